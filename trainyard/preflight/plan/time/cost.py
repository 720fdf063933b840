"""Speed, duration and price of a run, from the time of a step."""

from dataclasses import dataclass

from trainyard.config.schema import Config
from trainyard.families.flops import flops_per_sample
from trainyard.models import family_of
from trainyard.preflight.plan.hardware.spec import Hardware

HOUR_S = 3600.0


@dataclass(frozen=True)
class RunCost:
    sequences_per_second: float
    tokens_per_second: float
    mfu_full: float
    """Model FLOP utilization with every query-key pair counted, of the dense peak (of bf16 for fp8 too)."""
    mfu_causal: float
    """The same with only the pairs that a causal mask keeps."""
    days: float
    """Days until train.steps."""
    dollars: float | None
    price_per_hour: float | None
    """Dollars an hour for one instance; None if unknown."""


def estimate_cost(config: Config, hardware: Hardware, seconds: float, price_per_hour: float | None) -> RunCost:
    """The cost of a run whose steps take `seconds`. `price_per_hour` overrides the price in the catalog."""
    speed = config.train.global_batch / seconds
    blueprint = family_of(config.model).blueprint(config.model)
    flops = flops_per_sample(config.model, blueprint, config.data.seq_len, config.data.max_predictions)
    peak = hardware.peak_flops(config.precision.compute_dtype) * hardware.ranks
    hours = seconds * config.train.steps / HOUR_S
    price = hardware.entry.price_per_hour if price_per_hour is None else price_per_hour
    return RunCost(
        sequences_per_second=speed,
        tokens_per_second=speed * config.data.seq_len,
        mfu_full=speed * flops.full_attention / peak,
        mfu_causal=speed * flops.causal_attention / peak,
        days=hours / 24,
        dollars=None if price is None else hours * price * hardware.instances,
        price_per_hour=price,
    )

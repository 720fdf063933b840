"""Speed, days and dollars, from the time of a step."""

from dataclasses import dataclass

from trainyard.config.schema import Config
from trainyard.models import family_of
from trainyard.models.flops import flops_per_sample
from trainyard.plan.hardware.spec import Hardware

HOUR_S = 3600.0


@dataclass(frozen=True)
class RunCost:
    sequences_per_second: float
    tokens_per_second: float
    mfu_full: float
    """With every query-key pair counted, of the dense peak of what is computed in (bf16 for fp8 too)."""
    mfu_causal: float
    """With those that a causal mask keeps."""
    days: float
    """To train.steps."""
    dollars: float | None
    price_per_hour: float | None
    """Dollars an hour of one instance; None: not known."""


def estimate_cost(config: Config, hardware: Hardware, seconds: float, price_per_hour: float | None) -> RunCost:
    """`price` in dollars an hour for an instance; None: the table's."""
    speed = config.train.global_batch / seconds
    blueprint = family_of(config.model).blueprint(config.model)
    flops = flops_per_sample(config.model, blueprint, config.data.seq_len, config.data.max_predictions)
    peak = hardware.peak_flops(config.precision.compute_dtype) * hardware.ranks
    hours = seconds * config.train.steps / HOUR_S
    each = hardware.entry.price_per_hour if price_per_hour is None else price_per_hour
    return RunCost(
        speed,
        speed * config.data.seq_len,
        speed * flops.full_attention / peak,
        speed * flops.causal_attention / peak,
        hours / 24,
        None if each is None else hours * each * hardware.instances,
        each,
    )

"""Speed, days and dollars, from the time of a step."""

from dataclasses import dataclass

from trainyard.config.schema import Config
from trainyard.models import family
from trainyard.models.flops import per_sample
from trainyard.plan.hardware.spec import Hardware

HOUR = 3600.0


@dataclass(frozen=True)
class Cost:
    sequences_per_second: float
    tokens_per_second: float
    mfu_full: float
    """With every query-key pair counted, of the dense peak of what is computed in (bf16 for fp8 too)."""
    mfu_causal: float
    """With those that a causal mask keeps."""
    days: float
    """To train.steps."""
    dollars: float | None
    price: float | None
    """Dollars an hour of one instance; None: not known."""


def cost(config: Config, on: Hardware, seconds: float, price: float | None) -> Cost:
    """`price` in dollars an hour for an instance; None: the table's."""
    speed = config.train.global_batch / seconds
    blueprint = family(config.model).blueprint(config.model)
    flops = per_sample(config.model, blueprint, config.data.sequence, config.data.predictions)
    peak = on.peak(config.precision.compute) * on.ranks
    hours = seconds * config.train.steps / HOUR
    each = on.entry.price if price is None else price
    return Cost(
        speed,
        speed * config.data.sequence,
        speed * flops.full / peak,
        speed * flops.causal / peak,
        hours / 24,
        None if each is None else hours * each * on.instances,
        each,
    )

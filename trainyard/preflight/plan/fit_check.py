"""The memory check of `trainyard train`, before any weight is allocated."""

from collections.abc import Callable

from trainyard.config.schema import Config
from trainyard.core.constants import GIB
from trainyard.core.errors import UserError
from trainyard.devices.base import Device
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.memory.device_kinds import DEVICE_KINDS
from trainyard.preflight.plan.memory.local_sizes import RankSizes
from trainyard.preflight.plan.report import MEMORY_FILL_LIMIT, max_rank_memory, single_key_variants

REFUSE_FACTOR = 1.3
"""A run that needs this many times the available memory is refused. Estimates are within 5 %: see
docs/lab/memory-evidence.md."""


def check_fits(
    config: Config, layout: Layout, device: Device, warn: Callable[[str], None], local_size: int = 1
) -> None:
    """Refuse a run that cannot fit and warn about one that may not. Runs with a custom loss, whose memory is unknown,
    are not checked."""
    available = device.memory_per_rank(local_size)
    if available is None or config.train.loss:
        return
    device_kind = device.memory_model
    needed = max_rank_memory(config, layout, device_kind)
    if needed <= MEMORY_FILL_LIMIT * available:
        return
    message = f"memory: a rank needs about {needed / GIB:.1f} GiB and has {available / GIB:.1f}"
    fix = smallest_fix(config, layout, device_kind, available)
    # Packed batches: the data decide how much is padding, which needs no memory.
    packed = RankSizes(config, layout, DEVICE_KINDS[device_kind]).packed_batch
    depends_on_data = packed and config.data.source != "synthetic"
    if needed > REFUSE_FACTOR * available and not depends_on_data:
        raise UserError(f"{message}; {fix}")
    warn(f"note: {message}, so the run may fail; {fix}")


def smallest_fix(config: Config, layout: Layout, device_kind: str, available: int) -> str:
    """The single change that fits and saves the least memory, as advice for the user."""
    sizes = [
        (max_rank_memory(variant, variant_layout, device_kind), overrides)
        for overrides, variant, variant_layout in single_key_variants(config, layout.world_size)
    ]
    fitting = [entry for entry in sizes if entry[0] <= MEMORY_FILL_LIMIT * available]
    if not fitting:
        return "no single change makes it fit; run trainyard plan FILE --search"
    size, overrides = max(fitting)
    return f"nearest: {overrides} ({size / GIB:.1f} GiB)"

"""Whether a run has room where it is started, known before any of its weights is made."""

from collections.abc import Callable

from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.devices.base import Device
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import local_ranks
from trainyard.plan.memory.device_kinds import DEVICE_KINDS
from trainyard.plan.memory.local_sizes import rank_sizes
from trainyard.plan.report import MEMORY_FILL_LIMIT, max_rank_memory, single_key_variants

GIB = 2**30
REFUSE_FACTOR = 1.3
"""Plans were within 5 % of what was seen (docs/memory.md): one this far above what there is is not mistaken."""


def check_fits(config: Config, layout: Layout, device: Device, warn: Callable[[str], None]) -> None:
    """Refuses what cannot fit, and says what may not. Nothing is known of a loss of the user's own."""
    room = device.memory_per_rank(local_ranks())
    if room is None or config.train.loss:
        return
    needed = max_rank_memory(config, layout, device.memory_model)
    if needed <= MEMORY_FILL_LIMIT * room:
        return
    line = f"memory: a rank needs about {needed / GIB:.1f} GiB, it has {room / GIB:.1f}"
    near = smallest_fix(config, layout, device.memory_model, room)
    # How much of packed samples is padding, which takes nothing, their data decide.
    guessed = (
        rank_sizes(config, layout, DEVICE_KINDS[device.memory_model]).packed_batch and config.data.source != "synthetic"
    )
    if needed > REFUSE_FACTOR * room and not guessed:
        raise UserError(f"{line}; {near}")
    warn(f"note: {line}, so that it may fail; {near}")


def smallest_fix(config: Config, layout: Layout, device_kind: str, available: int) -> str:
    """The single change that fits and saves least; it is the least of a change."""
    sizes = [
        (max_rank_memory(other, changed, device_kind), words)
        for words, other, changed in single_key_variants(config, layout.world_size)
    ]
    fits = [each for each in sizes if each[0] <= MEMORY_FILL_LIMIT * available]
    if not fits:
        return "no single change makes it fit; trainyard plan FILE --search finds what does"
    size, chosen = max(fits)
    return f"nearest: {chosen} ({size / GIB:.1f} GiB)"

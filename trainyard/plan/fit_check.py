"""Whether a run has room where it is started, known before any of its weights is made."""

from collections.abc import Callable

from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.devices.base import Device
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import local_ranks
from trainyard.plan.memory.device_kinds import KINDS
from trainyard.plan.memory.local_sizes import run_of
from trainyard.plan.report import ROOM, largest, others

GIB = 2**30
SURE = 1.3
"""Plans were within 5 % of what was seen (docs/memory.md): one this far above what there is is not mistaken."""


def check_room(config: Config, layout: Layout, device: Device, say: Callable[[str], None]) -> None:
    """Refuses what cannot fit, and says what may not. Nothing is known of a loss of the user's own."""
    room = device.memory_total(local_ranks())
    if room is None or config.train.loss:
        return
    needed = largest(config, layout, device.memory_kind)
    if needed <= ROOM * room:
        return
    line = f"memory: a rank needs about {needed / GIB:.1f} GiB, it has {room / GIB:.1f}"
    near = nearest(config, layout, device.memory_kind, room)
    # How much of packed samples is padding, which takes nothing, their data decide.
    guessed = run_of(config, layout, KINDS[device.memory_kind]).packed and config.data.source != "synthetic"
    if needed > SURE * room and not guessed:
        raise UserError(f"{line}; {near}")
    say(f"note: {line}, so that it may fail; {near}")


def nearest(config: Config, layout: Layout, kind: str, room: int) -> str:
    """The single change that fits and saves least; it is the least of a change."""
    sizes = [(largest(other, changed, kind), words) for words, other, changed in others(config, layout.world)]
    fits = [each for each in sizes if each[0] <= ROOM * room]
    if not fits:
        return "no single change makes it fit; trainyard plan FILE --search finds what does"
    size, chosen = max(fits)
    return f"nearest: {chosen} ({size / GIB:.1f} GiB)"

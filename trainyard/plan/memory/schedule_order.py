"""In which order a pipeline rank runs its stages: forward passes, backward passes, and when what a micro batch has kept
is free again. As torch's schedules do it, of which `parallel/pipeline.py` takes one."""

from collections.abc import Iterator
from typing import Literal

from trainyard.parallel.layout import Layout

PipelineAction = tuple[Literal["forward", "backward", "free"], int]
"""What is done, and to which of the rank's stages, in the order in which a micro batch meets them."""

MAX_ROUNDS = 4
"""Of micro batches; after so many the order repeats itself."""


def schedule_actions(schedule: str, layout: Layout, pp: int) -> Iterator[PipelineAction]:
    if layout.pp == 1:
        yield from (("forward", 0), ("backward", 0), ("free", 0))
        return
    rounds = max(1, layout.micro_batches // layout.pp)
    each = layout.micro_batches // rounds
    count, stages = each * min(rounds, MAX_ROUNDS), layout.vpp
    total = count * stages
    after = layout.pp - 1 - pp
    late = 0
    """Backward passes whose weights' half, which frees, waits."""
    if schedule == "zbv":
        warmup, late = min(2 * layout.pp - 1, total), pp
    elif schedule == "zero_bubble":
        warmup, late = min((stages - 1) * each + after, total), pp
    elif stages > 1:
        warmup = min((stages - 1) * each + 2 * after, total)
    else:
        warmup = count if count < layout.pp else min(after, total)
    waiting: list[int] = []
    for step in range(total + warmup):
        if step < total:
            yield "forward", step // each % stages
        if step >= warmup:
            stage = stages - 1 - (step - warmup) // each % stages
            yield "backward", stage
            waiting.append(stage)
            if len(waiting) > late:
                yield "free", waiting.pop(0)

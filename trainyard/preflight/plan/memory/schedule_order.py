"""The order in which a pipeline rank runs forward and backward passes and frees what a micro batch saved.

It follows the torch schedules that `parallel/pipeline.py` uses.
"""

from collections.abc import Iterator
from typing import Literal

from trainyard.parallel.layout import Layout

PipelineAction = tuple[Literal["forward", "backward", "free"], int]
"""The action, and the index of the rank's stage in the order in which a micro batch meets them."""

MAX_ROUNDS = 4
"""Rounds of micro batches after which the order repeats."""


def schedule_actions(schedule: str, layout: Layout, pp: int) -> Iterator[PipelineAction]:
    """The actions of pipeline rank `pp`, for at most MAX_ROUNDS rounds of micro batches."""
    if layout.pp == 1:
        yield from (("forward", 0), ("backward", 0), ("free", 0))
        return
    rounds = max(1, layout.micro_batches // layout.pp)
    round_size = layout.micro_batches // rounds
    count, stages = round_size * min(rounds, MAX_ROUNDS), layout.vpp
    total = count * stages
    ranks_after = layout.pp - 1 - pp
    deferred_weight_passes = 0  # backward passes whose weight gradients, computed later, keep the activations
    if schedule == "zbv":
        warmup, deferred_weight_passes = min(2 * layout.pp - 1, total), pp
    elif schedule == "zero_bubble":
        warmup, deferred_weight_passes = min((stages - 1) * round_size + ranks_after, total), pp
    elif stages > 1:
        warmup = min((stages - 1) * round_size + 2 * ranks_after, total)
    else:
        warmup = count if count < layout.pp else min(ranks_after, total)
    waiting: list[int] = []
    for step in range(total + warmup):
        if step < total:
            yield "forward", step // round_size % stages
        if step >= warmup:
            stage = stages - 1 - (step - warmup) // round_size % stages
            yield "backward", stage
            waiting.append(stage)
            if len(waiting) > deferred_weight_passes:
                yield "free", waiting.pop(0)

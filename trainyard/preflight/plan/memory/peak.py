"""Peak memory of a rank, computed from the configuration alone: no device, and tensors without memory.

Optimizer state uses the `FlatBuffer` layout of a run. Activations come from a trace of a few layers of each stage, and
the pipeline schedule tells how many micro batches have saved theirs at the same time. The peak is the largest of a few
points: a pass of some micro batch, gradients in flight, the update, initialization. docs/internals/memory-model.md
explains each of them, docs/lab/memory-evidence.md compares with measurements.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from trainyard.config.schema import Config
from trainyard.devices.kind import DeviceKind
from trainyard.models import family_of
from trainyard.parallel.layout import Layout, StageSpec
from trainyard.preflight.plan.memory.optimizer_state import OptimizerMemory
from trainyard.preflight.plan.memory.pass_memory import PassMemory, RankMemory, RankSizes, pass_memory

PipelineAction = tuple[Literal["forward", "backward", "free"], int]
"""The action, and the index of the rank's stage in the order in which a micro batch meets them."""

MAX_ROUNDS = 4
"""Rounds of micro batches after which the order repeats."""


def estimate_memory(config: Config, layout: Layout, pp: int, device: DeviceKind) -> RankMemory:
    """The peak of a rank at pipeline position `pp`."""
    stages = layout.stages_on(pp)
    state = OptimizerMemory.from_config(config, layout, stages)
    sizes = RankSizes(config, layout, device)
    passes = [pass_memory(config, sizes, stage) for stage in stages]
    buffers = _batch_and_receive_bytes(config, layout, sizes, stages) + device.workspace_bytes
    candidates = (
        *_schedule_peaks(layout, config, pp, passes, state),
        *state.gradient_exchange(config, [memory.live_after_layer for memory in passes], device),
        state.update_workspace(config, layout, device),
        state.initialization(buffers),
    )
    peak = max(candidates, key=lambda candidate: candidate.total)
    allocated = state.resident + RankMemory(buffers=buffers) + peak
    return replace(allocated, fragmentation=int(allocated.total * device.fragmentation))


def _batch_and_receive_bytes(config: Config, layout: Layout, sizes: RankSizes, stages: list[StageSpec]) -> int:
    """The batches of a step on the device, and receive buffers: torch's pipeline schedules allocate one for each micro
    batch and neighbor."""
    batch = layout.micro_batches * sizes.micro_batch.full_bytes(family_of(config.model))
    neighbors = sum((not stage.is_first) + (not stage.is_last) for stage in stages)
    received = neighbors * layout.micro_batches * sizes.local_hidden_bytes
    return batch * (2 if sizes.device.is_host else 1) + (received if layout.pp > 1 else 0)


def _schedule_peaks(
    layout: Layout, config: Config, pp: int, passes: list[PassMemory], state: OptimizerMemory
) -> Iterator[RankMemory]:
    """The peak of each pass in the rank's schedule, with what the other micro batches in flight have saved."""
    saved = 0
    splits_backward = config.layout.pipeline_schedule != "1f1b" and layout.pp > 1
    at_loss, in_forward, in_backward = state.gathered_weights(config)
    for action, stage in schedule_actions(config.layout.pipeline_schedule, layout, pp):
        memory = passes[stage]
        deferred = memory.deferred_grads if splits_backward else 0
        if action == "forward":
            weights = at_loss if memory.forward.logits else in_forward
            yield memory.forward + RankMemory(weights, activations=saved)
            saved += memory.saved
        elif action == "backward":
            yield memory.backward + RankMemory(in_backward, activations=saved - memory.saved)
            saved += deferred
            yield RankMemory(activations=saved)
        else:
            saved -= memory.saved + deferred


def schedule_actions(schedule: str, layout: Layout, pp: int) -> Iterator[PipelineAction]:
    """The order in which pipeline rank `pp` runs forward and backward passes and frees what a micro batch saved, for at
    most MAX_ROUNDS rounds of micro batches. It is that of the torch schedules in `parallel/pipeline.py`."""
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

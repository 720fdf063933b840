"""Peak memory of a rank, computed from the configuration alone: no device, and tensors without memory.

Optimizer state uses the `FlatBuffer` layout of a run. Activations come from a trace of a few layers of each stage, and
the pipeline schedule tells how many micro batches have saved theirs at the same time. The peak is the largest of a few
points: a pass of some micro batch, gradients in flight, the update, initialization. docs/internals/memory-model.md
explains each of them, docs/lab/memory-evidence.md compares with measurements.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from trainyard.parallel.layout import Layout, StageSpec
from trainyard.preflight.plan.memory.optimizer_state import OptimizerMemory
from trainyard.preflight.plan.memory.pass_memory import PassMemory, RankMemory, pass_memory
from trainyard.preflight.plan.planned_run import PlannedRun

PipelineAction = tuple[Literal["forward", "backward", "free"], int]
"""The action, and the index of the rank's stage in the order in which a micro batch meets them."""

MAX_ROUNDS = 4
"""Rounds of micro batches after which the order repeats."""


def estimate_memory(run: PlannedRun, pp: int) -> RankMemory:
    """The peak of a rank at pipeline position `pp`."""
    stages = run.layout.stages_on(pp)
    state = OptimizerMemory(run, stages)
    passes = [pass_memory(run, stage) for stage in stages]
    buffers = _batch_and_receive_bytes(run, stages) + run.device.workspace_bytes + run.rollout_cache
    candidates = (
        *_schedule_peaks(run, pp, passes, state),
        *state.gradient_exchange([memory.live_after_layer for memory in passes]),
        *_reference_passes(passes, state),
        state.update_workspace(),
        state.initialization(buffers),
    )
    peak = max(candidates, key=lambda candidate: candidate.total)
    allocated = state.resident + RankMemory(buffers=buffers) + peak
    return replace(allocated, fragmentation=int(allocated.total * run.device.fragmentation))


def _reference_passes(passes: list[PassMemory], state: OptimizerMemory) -> Iterator[RankMemory]:
    """The forward pass of each stage, without what a backward pass needs, while the weights of step 0 are in place of
    the trained ones, which wait in another copy."""
    if state.run.preparation.keeps_weights:
        for memory in passes:
            yield memory.forward + RankMemory(state.trained_bytes, activations=-memory.saved)


def _batch_and_receive_bytes(run: PlannedRun, stages: list[StageSpec]) -> int:
    """The batches of a step on the device, and receive buffers: torch's pipeline schedules allocate one for each micro
    batch and neighbor."""
    layout = run.layout
    batch = layout.micro_batches * run.micro_batch.full_bytes(run.family)
    neighbors = sum((not stage.is_first) + (not stage.is_last) for stage in stages)
    received = neighbors * layout.micro_batches * run.local_hidden_bytes
    return batch * (2 if run.device.is_host else 1) + (received if layout.pp > 1 else 0)


def _schedule_peaks(run: PlannedRun, pp: int, passes: list[PassMemory], state: OptimizerMemory) -> Iterator[RankMemory]:
    """The peak of each pass in the rank's schedule, with what the other micro batches in flight have saved."""
    saved = 0
    splits_backward = run.pipeline_schedule != "1f1b" and run.layout.pp > 1
    at_loss, in_forward, in_backward = state.gathered_weights()
    for action, stage in schedule_actions(run.pipeline_schedule, run.layout, pp):
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

"""Peak memory of a rank, computed from the configuration alone: no device and no tensors.

Optimizer state uses the `FlatBuffer` layout of a run. Activations come from a `LivenessTimeline` of each stage, and the
pipeline schedule tells how many micro batches have saved theirs at the same time. The peak is the largest of a few
points: a pass of some micro batch, gradients in flight, the update, initialization. docs/internals/memory-model.md
explains each of them, docs/lab/memory-evidence.md compares with measurements.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainyard.config.schema import Config
from trainyard.parallel.layout import Layout, StageSpec
from trainyard.plan.memory.block_ops import LOSS_LAYER, stage_timeline
from trainyard.plan.memory.device_kinds import DEVICE_KINDS
from trainyard.plan.memory.liveness import LivenessTimeline
from trainyard.plan.memory.local_sizes import RankSizes
from trainyard.plan.memory.optimizer_state import OptimizerMemory
from trainyard.plan.memory.rank_memory import RankMemory
from trainyard.plan.memory.schedule_order import schedule_actions

MAX_TRACED_LAYERS = 128
"""Layers of a stage whose operations are listed one by one; more are extrapolated."""


def estimate_memory(config: Config, layout: Layout, pp: int, device_kind: str) -> RankMemory:
    """The peak of a rank at pipeline position `pp`; `device_kind` is a key of DEVICE_KINDS."""
    device = DEVICE_KINDS[device_kind]
    stages = layout.stages_on(pp)
    state = OptimizerMemory.from_config(config, layout, stages)
    sizes = RankSizes(config, layout, device)
    passes = [_pass_memory(config, sizes, stage) for stage in stages]
    buffers = _batch_and_receive_bytes(config, layout, sizes, stages, device_kind) + device.workspace_bytes
    candidates = (
        *_schedule_peaks(layout, config, pp, passes, state),
        *state.gradient_exchange(config, [memory.live_after_layer for memory in passes], device),
        state.update_workspace(config, device),
        state.initialization(buffers),
    )
    peak = max(candidates, key=lambda candidate: candidate.total)
    allocated = state.resident + RankMemory(buffers=buffers) + peak
    return replace(allocated, fragmentation=int(allocated.total * device.fragmentation))


def _batch_and_receive_bytes(
    config: Config, layout: Layout, sizes: RankSizes, stages: list[StageSpec], device_kind: str
) -> int:
    """The batches of a step on the device, and receive buffers: torch's pipeline schedules allocate one for each micro
    batch and neighbor."""
    samples = layout.micro_batches * config.train.micro_batch
    integers_per_sample = {
        "llama": 2 * sizes.seq_len,
        "gpt": 2 * sizes.seq_len,
        "bert": 3 * sizes.seq_len + 2 * config.data.max_predictions,
    }[config.model.family]
    if sizes.document_mask:
        integers_per_sample += 2 * sizes.seq_len
    batch = 4 * samples * (integers_per_sample + 2)
    neighbors = sum((not stage.is_first) + (not stage.is_last) for stage in stages)
    received = neighbors * layout.micro_batches * sizes.local_hidden_bytes
    return batch * (2 if device_kind == "cpu" else 1) + (received if layout.pp > 1 else 0)


@dataclass(frozen=True)
class PassMemory:
    """Memory of one micro batch in the forward and backward pass of a stage."""

    saved: int
    """Bytes saved from forward to backward."""
    forward: RankMemory
    """Peak of the forward pass."""
    backward: RankMemory
    """Peak of the backward pass."""
    deferred_grads: int
    """Gradients that wait for the weight half of a split backward pass."""
    live_after_layer: dict[int, int]
    """Live bytes after each layer's backward pass; -1 stands for the embedding."""

    @classmethod
    def from_timeline(cls, timeline: LivenessTimeline) -> "PassMemory":
        points = list(timeline.points())
        forward, backward = points[: timeline.forward_count], points[timeline.forward_count :]
        peak = max(forward, key=lambda point: point.size)
        logits = peak.allocated + peak.workspace if peak.layer == LOSS_LAYER else 0
        return cls(
            saved=backward[0].live_before,
            forward=RankMemory(activations=peak.size - logits, logits=logits),
            backward=RankMemory(activations=max(point.size for point in backward)),
            deferred_grads=timeline.deferred_grad_bytes,
            live_after_layer={point.layer: point.live for point in backward},
        )


def _pass_memory(config: Config, sizes: RankSizes, stage: StageSpec) -> PassMemory:
    """The memory of a stage. Beyond MAX_TRACED_LAYERS each layer adds what the last traced one adds."""

    def traced(count: int) -> PassMemory:
        part = replace(stage, layers=stage.layers[:count])
        return PassMemory.from_timeline(stage_timeline(config, sizes, part))

    more = len(stage.layers) - MAX_TRACED_LAYERS
    if more <= 0 or config.precision.kind == "fp8":  # the first and last layers of fp8 differ from the others
        return traced(len(stage.layers))
    long, short = traced(MAX_TRACED_LAYERS), traced(MAX_TRACED_LAYERS - 1)
    added = more * (long.saved - short.saved)
    last = stage.layers[MAX_TRACED_LAYERS - 1]
    return replace(
        long,
        saved=long.saved + added,
        forward=long.forward + RankMemory(activations=added),
        backward=long.backward + RankMemory(activations=added),
        deferred_grads=long.deferred_grads + more * (long.deferred_grads - short.deferred_grads),
        live_after_layer=long.live_after_layer
        | {last + index: long.live_after_layer[last] + index * (added // more) for index in range(1, more + 1)},
    )


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

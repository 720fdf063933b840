"""Peak memory of a rank, computed from the configuration alone: no device and no tensors.

Optimizer state uses the `FlatBuffer` layout of a run. Activations come from a `LivenessTimeline` of each stage, and the
pipeline schedule tells how many micro batches have saved theirs at the same time. The peak is the largest of a few
points: a pass of some micro batch, gradients in flight, the update, initialization. docs/internals/memory-model.md
explains each of them, docs/lab/memory-evidence.md compares with measurements.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from trainyard import models
from trainyard.config.schema import Config
from trainyard.parallel.layout import Layout, StageSpec
from trainyard.plan.memory.block_ops import LOSS_LAYER, stage_timeline
from trainyard.plan.memory.device_kinds import DEVICE_KINDS
from trainyard.plan.memory.liveness import LivenessTimeline, MemoryPoint
from trainyard.plan.memory.local_sizes import RankSizes, rank_sizes
from trainyard.plan.memory.optimizer_state import ExtraMemory, OptimizerMemory
from trainyard.plan.memory.schedule_order import schedule_actions


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank at its peak."""

    weights: int
    """Weights in the compute dtype; under ZeRO-2 and 3 the gathered ones."""
    gradients: int
    optimizer: int
    """Master weights, moments, and temporary memory of the update."""
    activations: int
    logits: int
    """Memory of the loss, if the peak is there."""
    buffers: int
    """Batches, receive buffers, buckets in flight, workspaces of libraries."""
    fragmentation: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def estimate_memory(config: Config, layout: Layout, pp: int, device_kind: str) -> RankMemory:
    """The peak of a rank at pipeline position `pp`; `device_kind` is a key of DEVICE_KINDS."""
    device = DEVICE_KINDS[device_kind]
    blueprint = models.family_of(config.model).blueprint(config.model)
    stages = layout.stages_on(pp)
    state = OptimizerMemory.from_config(config, layout, stages)
    sizes = rank_sizes(config, layout, device)
    local_vocab = blueprint.local_shape("embedding.weight", layout.tp)[0]
    fp8_end = config.model.layers - config.precision.bf16_last_layers if config.precision.kind == "fp8" else 0
    fp8_layers = range(config.precision.bf16_first_layers, fp8_end)
    passes = [
        PassMemory.from_timeline(stage_timeline(config, sizes, stage, local_vocab, device.logits_bytes, fp8_layers))
        for stage in stages
    ]
    resident = _batch_and_receive_bytes(config, layout, sizes, stages, device_kind) + device.workspace_bytes
    candidates = (
        *_schedule_peaks(layout, config, pp, passes, state),
        *state.gradient_exchange(config, [memory.live_after_layer for memory in passes], device),
        state.update_workspace(config, device),
        state.initialization(resident),
    )
    peak = max(candidates, key=lambda extra: extra.total)
    allocated = state.weights + state.gradients + state.optimizer + resident + peak.total
    return RankMemory(
        weights=state.weights + peak.weights,
        gradients=state.gradients,
        optimizer=state.optimizer + peak.optimizer,
        activations=peak.activations,
        logits=peak.logits,
        buffers=resident + peak.buffers,
        fragmentation=int(allocated * device.fragmentation),
    )


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
    hidden = sizes.local_tokens * sizes.hidden * sizes.element_size
    received = sum((not stage.is_first) + (not stage.is_last) for stage in stages) * layout.micro_batches * hidden
    return batch * (2 if device_kind == "cpu" else 1) + (received if layout.pp > 1 else 0)


@dataclass(frozen=True)
class PassMemory:
    """Memory of one micro batch in the forward and backward pass of a stage."""

    saved: int
    """Bytes saved from forward to backward."""
    forward: ExtraMemory
    """Peak of the forward pass."""
    backward: ExtraMemory
    """Peak of the backward pass."""
    deferred_grads: int
    """Gradients that wait for the weight half of a split backward pass."""
    live_after_layer: dict[int, int]
    """Live bytes after each layer's backward pass; -1 stands for the embedding."""

    @classmethod
    def from_timeline(cls, timeline: LivenessTimeline) -> "PassMemory":
        points = list(timeline.points())
        forward, backward = ([point for point in points if point.is_forward == half] for half in (True, False))
        return cls(
            saved=backward[0].live_before if backward else 0,
            forward=_peak(forward),
            backward=_peak(backward),
            deferred_grads=timeline.deferred_grad_bytes,
            live_after_layer={point.layer: point.live for point in backward},
        )


def _peak(points: list[MemoryPoint]) -> ExtraMemory:
    return _as_extra_memory(max(points, key=lambda point: point.live + point.workspace))


def _as_extra_memory(point: MemoryPoint) -> ExtraMemory:
    if point.is_forward and point.layer == LOSS_LAYER:
        return ExtraMemory(point.live - point.allocated, point.allocated + point.workspace)
    return ExtraMemory(point.live + point.workspace)


def _schedule_peaks(
    layout: Layout, config: Config, pp: int, passes: list[PassMemory], state: OptimizerMemory
) -> Iterator[ExtraMemory]:
    """The peak of each pass in the rank's schedule, with what the other micro batches in flight have saved."""
    saved = 0
    splits_backward = config.layout.pipeline_schedule != "1f1b" and layout.pp > 1
    at_loss = state.gathered_weights(config, at_loss=True, backward=False)
    in_forward = state.gathered_weights(config, at_loss=False, backward=False)
    in_backward = state.gathered_weights(config, at_loss=False, backward=True)
    for action, stage in schedule_actions(config.layout.pipeline_schedule, layout, pp):
        memory = passes[stage]
        deferred = memory.deferred_grads if splits_backward else 0
        if action == "forward":
            yield memory.forward.plus(saved, at_loss if memory.forward.logits else in_forward)
            saved += memory.saved
        elif action == "backward":
            yield memory.backward.plus(saved - memory.saved, in_backward)
            saved += deferred
            yield ExtraMemory(saved)
        else:
            saved -= memory.saved + deferred

"""What a run takes of a rank's memory, from the configuration alone: arithmetic, no device and no tensors.

The state of the optimizer is what `train/optim/optimizer.py` lays out, through the same `Flat`. Activations come from a
`Tape` of each stage, and how many micro batches hold theirs at once from the order of the schedule. The peak is the
largest of a few moments: a pass of some micro batch, gradients on their way to other ranks, the update.
docs/memory.md has it in words, with what was measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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
    """Bytes on one rank when it holds most."""

    weights: int
    """In the dtype that is computed with; under ZeRO-2 and 3 the gathered ones too."""
    gradients: int
    optimizer: int
    """Master weights and moments, and what an update takes besides."""
    activations: int
    logits: int
    """What the loss holds, where that is when most is held."""
    buffers: int
    """Batches, what is received or under way, workspaces of libraries."""
    fragmentation: int

    @property
    def total(self) -> int:
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.buffers
            + self.fragmentation
        )


def estimate_memory(config: Config, layout: Layout, pp: int, device_kind: str) -> RankMemory:
    """Of a rank at pipeline place `pp`; `kind` is one of KINDS."""
    device = DEVICE_KINDS[device_kind]
    blueprint = models.family_of(config.model).blueprint(config.model)
    stages = layout.stages_on(pp)
    state = OptimizerMemory.from_config(config, layout, blueprint, stages)
    run = rank_sizes(config, layout, device)
    words = blueprint.local_shape("embedding.weight", layout.tp)[0]
    last = config.model.layers - config.precision.bf16_last_layers
    fp8 = range(config.precision.bf16_first_layers, last if config.precision.kind == "fp8" else 0)
    passes = [
        PassMemory.from_timeline(stage_timeline(config, run, stage, words, device.logits_bytes, fp8))
        for stage in stages
    ]
    held = _batch_and_receive_bytes(config, layout, run, stages, device_kind) + device.workspace_bytes
    moments = (
        *_schedule_peaks(layout, config, pp, passes, state),
        *state.gradient_exchange(config, [one.live_after_layer for one in passes], device),
        state.update_workspace(config, device),
        state.initialization(held),
    )
    best = max(moments, key=lambda each: each.total)
    allocated = state.weights + state.gradients + state.optimizer + held + best.total
    return RankMemory(
        state.weights + best.weights,
        state.gradients,
        state.optimizer + best.optimizer,
        best.activations,
        best.logits,
        held + best.buffers,
        int(allocated * device.fragmentation),
    )


def _batch_and_receive_bytes(
    config: Config, layout: Layout, sizes: RankSizes, stages: list[StageSpec], device_kind: str
) -> int:
    """Batches of a step, as they lie on the device, and places for what neighbours in the pipeline send: torch's
    schedules have one for each micro batch."""
    samples = layout.micro_batches * config.train.micro_batch
    numbers = {
        "llama": 2 * sizes.seq_len,
        "gpt": 2 * sizes.seq_len,
        "bert": 3 * sizes.seq_len + 2 * config.data.max_predictions,
    }
    batch = 4 * samples * (numbers[config.model.family] + (2 * sizes.seq_len if sizes.document_mask else 0) + 2)
    between = sizes.local_tokens * sizes.hidden * sizes.element_size
    received = sum((not stage.is_first) + (not stage.is_last) for stage in stages) * layout.micro_batches * between
    return batch * (2 if device_kind == "cpu" else 1) + (received if layout.pp > 1 else 0)


@dataclass(frozen=True)
class PassMemory:
    """A micro batch through a stage and back."""

    saved: int
    forward: ExtraMemory
    backward: ExtraMemory
    deferred_grads: int
    """Gradients that wait for the weights' half, where backward is taken apart."""
    live_after_layer: dict[int, int]
    """Bytes that are live when a block's backward pass is over, by its number; -1: what is before the blocks."""

    @classmethod
    def from_timeline(cls, timeline: LivenessTimeline) -> "PassMemory":
        moments = list(timeline.points())
        left: dict[int, int] = {}
        for moment in moments:
            if not moment.is_forward:
                left[moment.layer] = moment.live
        top = [max(some, key=lambda moment: moment.live + moment.workspace) for some in _forward_and_backward(moments)]
        kept = next((moment.live_before for moment in moments if not moment.is_forward), 0)
        return cls(kept, _as_extra_memory(top[0]), _as_extra_memory(top[1]), timeline.deferred_grad_bytes, left)


def _forward_and_backward(points: list[MemoryPoint]) -> Iterator[list[MemoryPoint]]:
    for forward in (True, False):
        yield [moment for moment in points if moment.is_forward == forward]


def _as_extra_memory(point: MemoryPoint) -> ExtraMemory:
    if point.is_forward and point.layer == LOSS_LAYER:
        return ExtraMemory(point.live - point.allocated, point.allocated + point.workspace)
    return ExtraMemory(point.live + point.workspace)


def _schedule_peaks(
    layout: Layout, config: Config, pp: int, passes: list[PassMemory], state: OptimizerMemory
) -> Iterator[ExtraMemory]:
    """Each pass of the rank's schedule, with what the micro batches that are under way keep."""
    outstanding = 0
    whole = config.layout.pipeline_schedule == "1f1b" or layout.pp == 1
    at_loss, elsewhere, back = (
        state.gathered_weights(config, *how) for how in ((True, False), (False, False), (False, True))
    )
    for action, stage in schedule_actions(config.layout.pipeline_schedule, layout, pp):
        one = passes[stage]
        held = one.saved if whole else one.saved + one.deferred_grads
        if action == "forward":
            yield one.forward.plus(outstanding, at_loss if one.forward.logits else elsewhere)
            outstanding += one.saved
        elif action == "backward":
            yield one.backward.plus(outstanding - one.saved, back)
            outstanding += held - one.saved
            yield ExtraMemory(outstanding)
        else:
            outstanding -= held

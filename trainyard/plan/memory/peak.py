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
from trainyard.parallel.layout import Layout, Stage
from trainyard.plan.memory.block_ops import LOSS, tape
from trainyard.plan.memory.device_kinds import KINDS
from trainyard.plan.memory.liveness import Moment, Tape
from trainyard.plan.memory.local_sizes import Run, run_of
from trainyard.plan.memory.optimizer_state import Extra, State
from trainyard.plan.memory.schedule_order import order


@dataclass(frozen=True)
class Memory:
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


def memory(config: Config, layout: Layout, pp: int, kind: str) -> Memory:
    """Of a rank at pipeline place `pp`; `kind` is one of KINDS."""
    device = KINDS[kind]
    blueprint = models.family(config.model).blueprint(config.model)
    stages = layout.stages_of(pp)
    state = State.of(config, layout, blueprint, stages)
    run = run_of(config, layout, device)
    words = blueprint.local_shape("embedding.weight", layout.tp)[0]
    last = config.model.layers - config.precision.bf16_last
    fp8 = range(config.precision.bf16_first, last if config.precision.kind == "fp8" else 0)
    passes = [Pass.of(tape(config, run, stage, words, device.logits, fp8)) for stage in stages]
    held = _held(config, layout, run, stages, kind) + device.workspace
    moments = (
        *_in_flight(layout, config, pp, passes, state),
        *state.exchange(config, [one.left for one in passes], device),
        state.update(config, device),
        state.building(held),
    )
    best = max(moments, key=lambda each: each.total)
    allocated = state.weights + state.gradients + state.optimizer + held + best.total
    return Memory(
        state.weights + best.weights,
        state.gradients,
        state.optimizer + best.optimizer,
        best.activations,
        best.logits,
        held + best.buffers,
        int(allocated * device.fragmentation),
    )


def _held(config: Config, layout: Layout, run: Run, stages: list[Stage], kind: str) -> int:
    """Batches of a step, as they lie on the device, and places for what neighbours in the pipeline send: torch's
    schedules have one for each micro batch."""
    samples = layout.micro_batches * config.train.micro_batch
    numbers = {"llama": 2 * run.length, "gpt": 2 * run.length, "bert": 3 * run.length + 2 * config.data.predictions}
    batch = 4 * samples * (numbers[config.model.family] + (2 * run.length if run.documents else 0) + 2)
    between = run.own * run.hidden * run.element
    received = sum((not stage.first) + (not stage.last) for stage in stages) * layout.micro_batches * between
    return batch * (2 if kind == "cpu" else 1) + (received if layout.pp > 1 else 0)


@dataclass(frozen=True)
class Pass:
    """A micro batch through a stage and back."""

    kept: int
    forward: Extra
    backward: Extra
    split: int
    """Gradients that wait for the weights' half, where backward is taken apart."""
    left: dict[int, int]
    """Bytes that are live when a block's backward pass is over, by its number; -1: what is before the blocks."""

    @classmethod
    def of(cls, tape: Tape) -> "Pass":
        moments = list(tape.moments())
        left: dict[int, int] = {}
        for moment in moments:
            if not moment.forward:
                left[moment.block] = moment.held
        top = [max(some, key=lambda moment: moment.held + moment.work) for some in _halves(moments)]
        kept = next((moment.before for moment in moments if not moment.forward), 0)
        return cls(kept, _extra(top[0]), _extra(top[1]), tape.split, left)


def _halves(moments: list[Moment]) -> Iterator[list[Moment]]:
    for forward in (True, False):
        yield [moment for moment in moments if moment.forward == forward]


def _extra(moment: Moment) -> Extra:
    if moment.forward and moment.block == LOSS:
        return Extra(moment.held - moment.made, moment.made + moment.work)
    return Extra(moment.held + moment.work)


def _in_flight(layout: Layout, config: Config, pp: int, passes: list[Pass], state: State) -> Iterator[Extra]:
    """Each pass of the rank's schedule, with what the micro batches that are under way keep."""
    outstanding = 0
    whole = config.layout.schedule == "1f1b" or layout.pp == 1
    at_loss, elsewhere, back = (state.gathered(config, *how) for how in ((True, False), (False, False), (False, True)))
    for action, stage in order(config.layout.schedule, layout, pp):
        one = passes[stage]
        held = one.kept if whole else one.kept + one.split
        if action == "forward":
            yield one.forward.plus(outstanding, at_loss if one.forward.logits else elsewhere)
            outstanding += one.kept
        elif action == "backward":
            yield one.backward.plus(outstanding - one.kept, back)
            outstanding += held - one.kept
            yield Extra(outstanding)
        else:
            outstanding -= held

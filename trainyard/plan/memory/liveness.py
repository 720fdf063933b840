"""Live bytes over a forward and a backward pass, computed from a list of operations instead of tensors.

Autograd keeps a tensor while something will still read it: a later operation, or the backward pass of an operation that
saved it. A pass is therefore a sequence of events, forward and then backward, in which recomputed operations appear a
second time under new names. A tensor is live from the event that allocates it to the last event that reads it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import NamedTuple


class OpMemory(NamedTuple):
    """Memory of one operation of the model's code. All sizes are bytes; tensors are identified by name."""

    inputs: tuple[str, ...]
    """Activations that the operation reads. Each of them gets a gradient."""
    outputs: Mapping[str, int]
    """Size of each tensor that the operation allocates."""
    saved: tuple[str, ...] = ()
    """Inputs and outputs that the backward pass reads, besides gradients."""
    forward_workspace: int = 0
    """Temporary memory of the forward pass."""
    backward_workspace: int = 0
    """Temporary memory of the backward pass, weight gradients included."""
    views: Mapping[str, tuple[str, int]] = {}
    """Outputs that share memory with another tensor: that tensor's name, and the size of the view's gradient."""
    grad_aliases: tuple[str | None, ...] = ()
    """For each input, the tensor whose memory its gradient reuses. None or missing: the gradient has its own memory."""
    layer: int = -1
    """The layer that contains the operation; negative outside of the blocks."""
    recompute_group: tuple[object, ...] = ()
    """Consecutive operations of one group are recomputed together; empty if the operation is not recomputed."""


class LivenessEvent(NamedTuple):
    """An operation in its forward, recomputed or backward pass."""

    inputs: tuple[str, ...]
    outputs: Mapping[str, int]
    workspace: int
    layer: int


class MemoryPoint(NamedTuple):
    """Live bytes while an event runs."""

    live_before: int
    """Tensors that existed before the event, its inputs included."""
    allocated: int
    workspace: int
    layer: int

    @property
    def live(self) -> int:
        return self.live_before + self.allocated

    @property
    def size(self) -> int:
        return self.live + self.workspace


def grad_name(name: str) -> str:
    return f"d {name}"


class LivenessTimeline:
    """The events of a forward and a backward pass."""

    def __init__(self, ops: Sequence[OpMemory]) -> None:
        self.aliases: dict[str, str] = {}
        """The tensor that owns the memory of a view or of a gradient that reuses memory."""
        self.sizes: dict[str, int] = {}
        self.events: list[LivenessEvent] = []
        self.deferred_grad_bytes = sum(
            next(iter(op.outputs.values()), 0) for op in ops if op.inputs and op.backward_workspace
        )
        """Output gradients that stay alive where weight gradients are computed later (zero-bubble schedules)."""
        groups = [(group, list(members)) for group, members in groupby(ops, lambda op: op.recompute_group)]
        for op in ops:
            self._add_forward(op)
        self.forward_count = len(self.events)
        for group, members in reversed(groups):
            recomputed = self._add_recompute(members) if group else {}
            for op in reversed(members):
                self._add_backward(op, recomputed)

    def points(self) -> Iterator[MemoryPoint]:
        last_use: dict[str, int] = {}
        for index, event in enumerate(self.events):
            for name in (*event.inputs, *event.outputs):
                last_use[self.aliases.get(name, name)] = index
        freed = [0] * len(self.events)
        for event in self.events:
            for name, size in event.outputs.items():
                freed[last_use[name]] += size
        live = 0
        for event, unused in zip(self.events, freed, strict=True):
            allocated = sum(event.outputs.values())
            yield MemoryPoint(live, allocated, event.workspace, event.layer)
            live += allocated - unused

    def _add_forward(self, op: OpMemory) -> None:
        self.sizes |= op.outputs
        for name, (base, size) in op.views.items():
            self.aliases[name] = self.aliases.get(base, base)
            self.sizes[name] = size
        self.events.append(LivenessEvent(op.inputs, op.outputs, op.forward_workspace, op.layer))

    def _add_recompute(self, ops: list[OpMemory]) -> dict[str, str]:
        """Repeat the forward pass up to the last operation that saves something. Returns the new names of tensors."""
        names: dict[str, str] = {}
        end = max((index for index, op in enumerate(ops) if op.saved), default=-1)
        for index, op in enumerate(ops[: end + 1]):
            inputs = tuple(names.get(name, name) for name in op.inputs)
            outputs = {f"{name} again": size for name, size in op.outputs.items()}
            names |= {name: f"{name} again" for name in (*op.outputs, *op.views)}
            views = {f"{name} again": (names.get(base, base), size) for name, (base, size) in op.views.items()}
            if index == end:  # recomputation stops as soon as the last saved tensors exist
                outputs = {name: size for name, size in outputs.items() if name.removesuffix(" again") in op.saved}
            self._add_forward(op._replace(inputs=inputs, outputs=outputs, views=views))
        return names

    def _add_backward(self, op: OpMemory, recomputed: Mapping[str, str]) -> None:
        """`recomputed` maps tensors to their recomputed copies."""
        output_grads = [grad_name(name) for name in (*op.outputs, *op.views)]
        inputs = [name for name in output_grads if name in self.sizes]
        inputs += [recomputed.get(name, name) for name in op.saved]
        outputs: dict[str, int] = {}
        workspace = op.backward_workspace
        for name, alias in zip_longest(op.inputs, op.grad_aliases):
            gradient, size = grad_name(name), self.sizes[name]
            if gradient in self.sizes:  # another reader's gradient exists: this one is added to it
                workspace += 0 if alias else size
                inputs.append(gradient)
                continue
            self.sizes[gradient] = size
            if alias is None:
                outputs[gradient] = size
            else:
                alias = recomputed.get(alias, alias)
                self.aliases[gradient] = self.aliases.get(alias, alias)
        self.events.append(LivenessEvent(tuple(inputs), outputs, workspace, op.layer))

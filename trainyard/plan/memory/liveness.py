"""Bytes over a forward and a backward pass, without tensors: a row of operations, what each makes and what each keeps.

Autograd holds a tensor while somebody will still read it: a later operation, or the backward pass of an operation that
has kept it. So a pass is written down as a straight line of events, forward and then backward, in which what is
recomputed appears a second time under names of its own; a tensor is live from the event that makes it to the last that
reads it. Everything follows from that, whatever is recomputed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import NamedTuple


class OpMemory(NamedTuple):
    """One operation, as large as the model's code makes one thing of it. Bytes throughout."""

    inputs: tuple[str, ...]
    """Activations that come in, each with a gradient."""
    outputs: Mapping[str, int]
    saved: tuple[str, ...] = ()
    """What its backward pass reads besides the gradients: of `reads` and `makes`."""
    forward_workspace: int = 0
    """Taken while it runs, besides all of these."""
    backward_workspace: int = 0
    """The same in the backward pass; gradients of weights among it."""
    views: Mapping[str, tuple[str, int]] = {}
    """New names for memory that is there already, and how large their gradients are."""
    grad_aliases: tuple[str | None, ...] = ()
    """For each of `reads`: the tensor whose memory its gradient is; None, or left out: it has its own."""
    scopes: tuple[str, ...] = ()
    """The parts of a block that it is in, outermost first."""
    layer: int = -1
    """Which block it is in; before the first: -1."""


class LivenessEvent(NamedTuple):
    inputs: tuple[str, ...]
    outputs: Mapping[str, int]
    workspace: int
    layer: int


class MemoryPoint(NamedTuple):
    """What is live while an event runs."""

    live_before: int
    """Tensors that were there already, those it reads among them."""
    allocated: int
    workspace: int
    layer: int
    is_forward: bool

    @property
    def live(self) -> int:
        return self.live_before + self.allocated


def grad_name(name: str) -> str:
    return f"d {name}"


class LivenessTimeline:
    def __init__(self, ops: Sequence[OpMemory], recompute_group: Callable[[OpMemory], object]) -> None:
        """`again` tells which operations are recomputed together: those in a row with the same answer; None: not."""
        self.aliases: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        """Of tensors by name: the memory of some is another's."""
        self.events: list[LivenessEvent] = []
        self.deferred_grad_bytes = sum(
            next(iter(op.outputs.values()), 0) for op in ops if op.inputs and op.backward_workspace
        )
        """Gradients that a backward pass holds on to, if those of weights are left for later."""
        spans = [(key, list(some)) for key, some in groupby(ops, recompute_group)]
        for op in ops:
            self._add_forward(op, op.inputs, op.outputs, op.views)
        self.forward_count = len(self.events)
        for key, some in reversed(spans):
            names = self._add_recompute(some) if key is not None else {}
            for op in reversed(some):
                self._add_backward(op, names)

    def points(self) -> Iterator[MemoryPoint]:
        held = 0
        for number, (event, made, gone) in enumerate(zip(self.events, *self._lifetimes(), strict=True)):
            yield MemoryPoint(held, made, event.workspace, event.layer, number < self.forward_count)
            held += made - gone

    def _lifetimes(self) -> tuple[list[int], list[int]]:
        """Bytes that each event makes, and that nobody reads after it."""
        last: dict[str, int] = {}
        for number, event in enumerate(self.events):
            for name in (*event.inputs, *event.outputs):
                last[self.aliases.get(name, name)] = number
        made = [sum(event.outputs.values()) for event in self.events]
        gone = [0] * len(self.events)
        for event in self.events:
            for name, size in event.outputs.items():
                gone[last[name]] += size
        return made, gone

    def _add_forward(
        self, op: OpMemory, inputs: tuple[str, ...], outputs: Mapping[str, int], views: Mapping[str, tuple[str, int]]
    ) -> None:
        self.sizes |= outputs
        for name, (of, size) in views.items():
            self.aliases[name] = self.aliases.get(of, of)
            self.sizes[name] = size
        self.events.append(LivenessEvent(inputs, outputs, op.forward_workspace, op.layer))

    def _add_recompute(self, ops: list[OpMemory]) -> dict[str, str]:
        """Forward once more, up to the last operation that keeps something; gives the names of what is made."""
        names: dict[str, str] = {}
        end = max((number for number, op in enumerate(ops) if op.saved), default=-1)
        for number, op in enumerate(ops[: end + 1]):
            reads = tuple(names.get(name, name) for name in op.inputs)
            makes = {f"{name} again": size for name, size in op.outputs.items()}
            names |= {name: f"{name} again" for name in (*op.outputs, *op.views)}
            views = {f"{name} again": (names.get(of, of), size) for name, (of, size) in op.views.items()}
            if number == end:  # it stops as soon as what this one keeps is there
                makes = {name: size for name, size in makes.items() if name.removesuffix(" again") in op.saved}
            self._add_forward(op, reads, makes, views)
        return names

    def _add_backward(self, op: OpMemory, names: Mapping[str, str]) -> None:
        outs = [grad_name(name) for name in (*op.outputs, *op.views)]
        reads = [name for name in outs if name in self.sizes]
        reads += [names.get(name, name) for name in op.saved]
        makes: dict[str, int] = {}
        work = op.backward_workspace
        for name, of in zip_longest(op.inputs, op.grad_aliases):
            new, size = grad_name(name), self.sizes[name]
            if new in self.sizes:  # a second one, added to the first
                work += 0 if of else size
                reads.append(new)
                continue
            self.sizes[new] = size
            if of is None:
                makes[new] = size
            else:
                of = names.get(of, of)
                self.aliases[new] = self.aliases.get(of, of)
        self.events.append(LivenessEvent(tuple(reads), makes, work, op.layer))

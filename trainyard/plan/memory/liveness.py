"""Bytes over a forward and a backward pass, without tensors: a row of operations, what each makes and what each keeps.

Autograd holds a tensor while somebody will still read it: a later operation, or the backward pass of an operation that
has kept it. So a pass is written down as a straight line of events, forward and then backward, in which what is
recomputed appears a second time under names of its own; a tensor is live from the event that makes it to the last that
reads it. Everything follows from that, whatever is recomputed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import NamedTuple


class Op(NamedTuple):
    """One operation, as large as the model's code makes one thing of it. Bytes throughout."""

    reads: tuple[str, ...]
    """Activations that come in, each with a gradient."""
    makes: Mapping[str, int]
    keeps: tuple[str, ...] = ()
    """What its backward pass reads besides the gradients: of `reads` and `makes`."""
    work: int = 0
    """Taken while it runs, besides all of these."""
    back: int = 0
    """The same in the backward pass; gradients of weights among it."""
    views: Mapping[str, tuple[str, int]] = {}
    """New names for memory that is there already, and how large their gradients are."""
    share: tuple[str | None, ...] = ()
    """For each of `reads`: the tensor whose memory its gradient is; None, or left out: it has its own."""
    parts: tuple[str, ...] = ()
    """The parts of a block that it is in, outermost first."""
    block: int = -1
    """Which block it is in; before the first: -1."""


class Event(NamedTuple):
    reads: tuple[str, ...]
    makes: Mapping[str, int]
    work: int
    block: int


class Moment(NamedTuple):
    """What is live while an event runs."""

    before: int
    """Tensors that were there already, those it reads among them."""
    made: int
    work: int
    block: int
    forward: bool

    @property
    def held(self) -> int:
        return self.before + self.made


def gradient(name: str) -> str:
    return f"d {name}"


class Tape:
    def __init__(self, ops: Sequence[Op], again: Callable[[Op], object]) -> None:
        """`again` tells which operations are recomputed together: those in a row with the same answer; None: not."""
        self.storage: dict[str, str] = {}
        self.size: dict[str, int] = {}
        """Of tensors by name: the memory of some is another's."""
        self.events: list[Event] = []
        self.split = sum(next(iter(op.makes.values()), 0) for op in ops if op.reads and op.back)
        """Gradients that a backward pass holds on to, if those of weights are left for later."""
        spans = [(key, list(some)) for key, some in groupby(ops, again)]
        for op in ops:
            self._forward(op, op.reads, op.makes, op.views)
        self.forward = len(self.events)
        for key, some in reversed(spans):
            names = self._again(some) if key is not None else {}
            for op in reversed(some):
                self._backward(op, names)

    def moments(self) -> Iterator[Moment]:
        held = 0
        for number, (event, made, gone) in enumerate(zip(self.events, *self._lives(), strict=True)):
            yield Moment(held, made, event.work, event.block, number < self.forward)
            held += made - gone

    def _lives(self) -> tuple[list[int], list[int]]:
        """Bytes that each event makes, and that nobody reads after it."""
        last: dict[str, int] = {}
        for number, event in enumerate(self.events):
            for name in (*event.reads, *event.makes):
                last[self.storage.get(name, name)] = number
        made = [sum(event.makes.values()) for event in self.events]
        gone = [0] * len(self.events)
        for event in self.events:
            for name, size in event.makes.items():
                gone[last[name]] += size
        return made, gone

    def _forward(
        self, op: Op, reads: tuple[str, ...], makes: Mapping[str, int], views: Mapping[str, tuple[str, int]]
    ) -> None:
        self.size |= makes
        for name, (of, size) in views.items():
            self.storage[name] = self.storage.get(of, of)
            self.size[name] = size
        self.events.append(Event(reads, makes, op.work, op.block))

    def _again(self, ops: list[Op]) -> dict[str, str]:
        """Forward once more, up to the last operation that keeps something; gives the names of what is made."""
        names: dict[str, str] = {}
        end = max((number for number, op in enumerate(ops) if op.keeps), default=-1)
        for number, op in enumerate(ops[: end + 1]):
            reads = tuple(names.get(name, name) for name in op.reads)
            makes = {f"{name} again": size for name, size in op.makes.items()}
            names |= {name: f"{name} again" for name in (*op.makes, *op.views)}
            views = {f"{name} again": (names.get(of, of), size) for name, (of, size) in op.views.items()}
            if number == end:  # it stops as soon as what this one keeps is there
                makes = {name: size for name, size in makes.items() if name.removesuffix(" again") in op.keeps}
            self._forward(op, reads, makes, views)
        return names

    def _backward(self, op: Op, names: Mapping[str, str]) -> None:
        outs = [gradient(name) for name in (*op.makes, *op.views)]
        reads = [name for name in outs if name in self.size]
        reads += [names.get(name, name) for name in op.keeps]
        makes: dict[str, int] = {}
        work = op.back
        for name, of in zip_longest(op.reads, op.share):
            new, size = gradient(name), self.size[name]
            if new in self.size:  # a second one, added to the first
                work += 0 if of else size
                reads.append(new)
                continue
            self.size[new] = size
            if of is None:
                makes[new] = size
            else:
                of = names.get(of, of)
                self.storage[new] = self.storage.get(of, of)
        self.events.append(Event(tuple(reads), makes, work, op.block))

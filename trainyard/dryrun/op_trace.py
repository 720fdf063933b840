"""Work written down as it is asked for: every operator with its dtypes and shapes, the line of code that asked, and the
bytes that are alive meanwhile.

So that two traces can be compared, an operator is kept as text in which a tensor is named by how long ago its memory
was last used, a group of ranks by what it is for, and a number by itself: the same text at the same place means the
same graph.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainyard import compat
from trainyard.dryrun.live_memory import Alive
from trainyard.dryrun.meta_ops import FUSED_UPDATE, Halt, plain_update, run, tensors
from trainyard.dryrun.source_lines import Lines, Place
from trainyard.parallel.mesh import Mesh

GROUPS = ("tp", "cp", "pp", "data", "stage", "everyone", "copies", "tied")
PLAIN = (Tensor, torch.nn.Parameter)
SENDING = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
"""What brings a tensor of the host's to the device."""


class Value(NamedTuple):
    """A tensor of the device, or of the host."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    host: bool

    def __str__(self) -> str:
        where = "host " if self.host else ""
        return f"{where}{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Argument(NamedTuple):
    text: str
    """For people."""
    detail: str = ""
    """What else to compare."""
    values: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Operation:
    name: str
    """As torch names it, such as aten.mm."""
    arguments: tuple[Argument, ...]
    results: tuple[Value, ...]
    text: str
    """With shapes, dtypes and numbers, for people."""
    detail: str
    """With the memory of each tensor too, to compare."""
    place: Place
    varies: bool
    """What comes out has a shape that depends on values."""
    answers: bool
    """The host is told a value."""
    group: str | None
    """Of ranks that take part."""


class Segment(NamedTuple):
    """A model's forward pass within a phase."""

    phase: str
    model: int
    first: int
    end: int


@dataclass
class Trace:
    rank: int
    stage: int
    operations: list[Operation] = field(default_factory=list)
    """Each distinct one once."""
    phases: dict[str, list[int]] = field(default_factory=dict)
    """step 1, step 2, ..., evaluation: numbers of operations in the order in which they ran."""
    segments: list[Segment] = field(default_factory=list)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    peak: int = 0
    """Most bytes alive at once on the device in the last step."""
    peak_at: str = ""
    """FILE:LINE at that moment."""
    kept: int = 0
    """Bytes alive between steps."""
    halted: str | None = None
    """Why the trace ends early."""

    def texts(self, phase: str, first: int = 0, end: int | None = None) -> list[str]:
        return [self.operations[number].text for number in self.phases[phase][first:end]]

    def details(self, phase: str) -> list[str]:
        return [self.operations[number].detail for number in self.phases[phase]]

    def digest(self, phase: str) -> str:
        return blake2b("\n".join(self.details(phase)).encode(), digest_size=8).hexdigest()


class Recorder(compat.DispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what torch is asked for while it is entered and a phase is open."""

    def __init__(self, out: Trace, mesh: Mesh, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.out, self.device = out, device
        named = {name: getattr(mesh, name) for name in GROUPS}
        self.groups = {group.name: name for name, group in named.items() if group.size > 1}
        out.groups = {name: named[name].ranks for name in self.groups.values()}
        self.lines, self.alive = Lines(), Alive(device)
        self.sequence: list[int] | None = None
        self.name = ""
        self.began: list[int] = []
        self.numbers: dict[tuple[str, Place], int] = {}
        self.names: dict[Any, str] = {}
        self.shown: dict[Value, str] = {}
        self.place = Place()
        self.inside = 0
        """How deep in operators that are one in the graph around them."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.sequence = self.out.phases[name] = []
        self.name = name
        self.alive.restart()
        yield
        self.sequence = None
        if name.startswith("step"):
            self.out.peak, self.out.peak_at, self.out.kept = self.alive.peak, str(self.alive.peak_at), self.alive.now

    def begin(self) -> None:
        """A model's forward pass."""
        self.began.append(len(self.sequence or ()))

    def end(self, model: int) -> None:
        first = self.began.pop()
        if self.sequence is not None:
            self.out.segments.append(Segment(self.name, model, first, len(self.sequence)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each not in PLAIN for each in types):
            return NotImplemented  # a tensor that describes others: what it does with those will come by
        kwargs = kwargs or {}
        # What goes in is put into words before anything runs: operators may change it.
        place = self.place = self.lines.place(sys._getframe(1))
        sent = function in SENDING
        arguments = [self._argument(each, sent) for each in (*args, *kwargs.values())]
        on_device = any(not value.host for argument in arguments for value in argument.values)
        try:
            out = self._run(function, args, kwargs) if on_device else function(*args, **kwargs)
        except Halt:
            self._write(function, arguments, None, place, on_device)
            raise
        made = [each for each in tensors(out) if each.device.type == self.device.type]
        if on_device or made:  # else it is the host's own work
            self._write(function, arguments, out, place, on_device)
            for each in made:
                self.alive.touch(each, place)
        return out

    def _write(self, function: Any, arguments: list[Argument], out: Any, place: Place, on_device: bool) -> None:
        if self.sequence is None:
            return
        name = self.names.get(function) or self.names.setdefault(function, str(function).removesuffix(".default"))
        text = f"{name}({', '.join(each.text for each in arguments if each.text)})"
        detail = f"{text} {' '.join(each.detail for each in arguments)}"
        number = self.numbers.get((detail, place))
        if number is None:
            number = self.numbers[detail, place] = len(self.out.operations)
            results = tuple(self._value(each) for each in tensors(out))
            leaves = on_device and any(value.host for value in results)
            self.out.operations.append(
                Operation(
                    name,
                    tuple(arguments),
                    results,
                    f"{text} -> {', '.join(map(str, results))}" if results else text,
                    detail,
                    place,
                    torch.Tag.dynamic_output_shape in function.tags and _by_values(function, arguments),
                    leaves or torch.Tag.data_dependent_output in function.tags,
                    next((each.text for each in arguments if each.text in self.out.groups), None),
                )
            )
        if not self.inside:
            self.sequence.append(number)

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function is FUSED_UPDATE:
            # Trainium is given the plain update, as one compiled pass: what it holds on the way is not memory.
            before = self.alive.peak, self.alive.peak_at
            self._within(plain_update, args, kwargs)
            self.alive.peak, self.alive.peak_at = before
            return None
        return run(function, args, kwargs, self.device)

    def _within(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What an opaque operator does is looked at, but is not part of the graph around it."""
        self.inside += 1
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self.inside -= 1

    def _value(self, tensor: Tensor) -> Value:
        return Value(tensor.dtype, tuple(tensor.shape), tensor.device.type != self.device.type)

    def _argument(self, argument: Any, sent: bool = False) -> Argument:
        if isinstance(argument, Tensor):
            value = self._value(argument)
            if value.host:
                # A number of the host's that is not sent becomes part of the graph.
                number = f"={argument.item()}" if argument.dim() == 0 and not sent else ""
                return Argument(f"{value}{number}", "", (value,))
            age = self.alive.age(argument, len(self.sequence or ()), self.place)
            text = self.shown.get(value) or self.shown.setdefault(value, str(value))
            return Argument(text, f"@{age}+{argument.storage_offset()}{argument.stride()}", (value,))
        if isinstance(argument, str):
            return Argument(self.groups.get(argument, argument))
        if isinstance(argument, (list, tuple)):
            parts = [self._argument(each) for each in argument]
            inner = ", ".join(part.text for part in parts)
            values = tuple(value for part in parts for value in part.values)
            return Argument(f"[{inner}]", " ".join(part.detail for part in parts), values)
        if isinstance(argument, (int, float, complex, torch.dtype, type(None))):
            return Argument(str(argument).removeprefix("torch."))
        if isinstance(argument, (torch.device, torch.layout, torch.memory_format)):
            return Argument("")
        try:
            return Argument(self.groups.get(dist.ProcessGroup.unbox(argument).group_name, "group"))
        except (RuntimeError, TypeError, AttributeError):  # not a group
            return Argument(type(argument).__name__)


def _by_values(function: Any, arguments: list[Argument]) -> bool:
    """Indexing gives a shape that depends on values only where the index is a mask."""
    if function is not torch.ops.aten.index.Tensor:
        return True
    return any(value.dtype in (torch.bool, torch.uint8) for value in arguments[1].values)

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
from trainyard.dryrun.live_memory import LiveBytes
from trainyard.dryrun.meta_ops import FUSED_ADAMW, TraceAborted, run_on_meta, tensors_in, unfused_adamw
from trainyard.dryrun.source_lines import SourceLocation, SourceLocator
from trainyard.parallel.mesh import Mesh

MESH_GROUPS = ("tp", "cp", "pp", "dp_cp", "dp_cp_tp", "world", "kv_replicas", "tied_embedding")
PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter)
HOST_TO_DEVICE_OPS = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
"""What brings a tensor of the host's to the device."""


class TensorInfo(NamedTuple):
    """A tensor of the device, or of the host."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool

    def __str__(self) -> str:
        where = "host " if self.on_host else ""
        return f"{where}{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class OpArgument(NamedTuple):
    text: str
    """For people."""
    detail: str = ""
    """What else to compare."""
    tensors: tuple[TensorInfo, ...] = ()


@dataclass(frozen=True)
class TracedOp:
    name: str
    """As torch names it, such as aten.mm."""
    arguments: tuple[OpArgument, ...]
    results: tuple[TensorInfo, ...]
    text: str
    """With shapes, dtypes and numbers, for people."""
    detail: str
    """With the memory of each tensor too, to compare."""
    source: SourceLocation
    dynamic_shape: bool
    """What comes out has a shape that depends on values."""
    reads_to_host: bool
    """The host is told a value."""
    group: str | None
    """Of ranks that take part."""


class ForwardSegment(NamedTuple):
    """A model's forward pass within a phase."""

    phase: str
    model: int
    start: int
    end: int


@dataclass
class RankTrace:
    rank: int
    stage: int
    operations: list[TracedOp] = field(default_factory=list)
    """Each distinct one once."""
    phases: dict[str, list[int]] = field(default_factory=dict)
    """step 1, step 2, ..., evaluation: numbers of operations in the order in which they ran."""
    segments: list[ForwardSegment] = field(default_factory=list)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    peak_bytes: int = 0
    """Most bytes alive at once on the device in the last step."""
    peak_location: str = ""
    """FILE:LINE at that moment."""
    steady_bytes: int = 0
    """Bytes alive between steps."""
    abort_reason: str | None = None
    """Why the trace ends early."""

    def texts(self, phase: str, start: int = 0, end: int | None = None) -> list[str]:
        return [self.operations[number].text for number in self.phases[phase][start:end]]

    def details(self, phase: str) -> list[str]:
        return [self.operations[number].detail for number in self.phases[phase]]

    def digest(self, phase: str) -> str:
        return blake2b("\n".join(self.details(phase)).encode(), digest_size=8).hexdigest()


class OpRecorder(compat.DispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what torch is asked for while it is entered and a phase is open."""

    def __init__(self, trace: RankTrace, mesh: Mesh, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace, self.device = trace, device
        named = {name: getattr(mesh, name) for name in MESH_GROUPS}
        self.groups = {group.name: name for name, group in named.items() if group.size > 1}
        trace.groups = {name: named[name].ranks for name in self.groups.values()}
        self.locator, self.live = SourceLocator(), LiveBytes(device)
        self.phase_ops: list[int] | None = None
        self.phase_name = ""
        self.forward_starts: list[int] = []
        self.op_indices: dict[tuple[str, SourceLocation], int] = {}
        self.op_names: dict[Any, str] = {}
        self.tensor_texts: dict[TensorInfo, str] = {}
        self.source = SourceLocation()
        self.opaque_depth = 0
        """How deep in operators that are one in the graph around them."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phase_ops = self.trace.phases[name] = []
        self.phase_name = name
        self.live.begin_phase()
        yield
        self.phase_ops = None
        if name.startswith("step"):
            self.trace.peak_bytes, self.trace.peak_location, self.trace.steady_bytes = (
                self.live.peak,
                str(self.live.peak_location),
                self.live.current,
            )

    def begin_forward(self) -> None:
        """A model's forward pass."""
        self.forward_starts.append(len(self.phase_ops or ()))

    def end_forward(self, model: int) -> None:
        first = self.forward_starts.pop()
        if self.phase_ops is not None:
            self.trace.segments.append(ForwardSegment(self.phase_name, model, first, len(self.phase_ops)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each not in PLAIN_TENSOR_TYPES for each in types):
            return NotImplemented  # a tensor that describes others: what it does with those will come by
        kwargs = kwargs or {}
        # What goes in is put into words before anything runs: operators may change it.
        place = self.source = self.locator.locate(sys._getframe(1))
        sent = function in HOST_TO_DEVICE_OPS
        arguments = [self._describe_argument(each, sent) for each in (*args, *kwargs.values())]
        on_device = any(not value.on_host for argument in arguments for value in argument.tensors)
        try:
            out = self._run_op(function, args, kwargs) if on_device else function(*args, **kwargs)
        except TraceAborted:
            self._record_op(function, arguments, None, place, on_device)
            raise
        made = [each for each in tensors_in(out) if each.device.type == self.device.type]
        if on_device or made:  # else it is the host's own work
            self._record_op(function, arguments, out, place, on_device)
            for each in made:
                self.live.track(each, place)
        return out

    def _record_op(
        self, function: Any, arguments: list[OpArgument], out: Any, source: SourceLocation, on_device: bool
    ) -> None:
        if self.phase_ops is None:
            return
        name = self.op_names.get(function) or self.op_names.setdefault(function, str(function).removesuffix(".default"))
        text = f"{name}({', '.join(each.text for each in arguments if each.text)})"
        detail = f"{text} {' '.join(each.detail for each in arguments)}"
        number = self.op_indices.get((detail, source))
        if number is None:
            number = self.op_indices[detail, source] = len(self.trace.operations)
            results = tuple(self._tensor_info(each) for each in tensors_in(out))
            leaves = on_device and any(value.on_host for value in results)
            self.trace.operations.append(
                TracedOp(
                    name,
                    tuple(arguments),
                    results,
                    f"{text} -> {', '.join(map(str, results))}" if results else text,
                    detail,
                    source,
                    torch.Tag.dynamic_output_shape in function.tags and _depends_on_values(function, arguments),
                    leaves or torch.Tag.data_dependent_output in function.tags,
                    next((each.text for each in arguments if each.text in self.trace.groups), None),
                )
            )
        if not self.opaque_depth:
            self.phase_ops.append(number)

    def _run_op(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function is FUSED_ADAMW:
            # Trainium is given the plain update, as one compiled pass: what it holds on the way is not memory.
            before = self.live.peak, self.live.peak_location
            self._run_opaque(unfused_adamw, args, kwargs)
            self.live.peak, self.live.peak_location = before
            return None
        return run_on_meta(function, args, kwargs, self.device)

    def _run_opaque(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What an opaque operator does is looked at, but is not part of the graph around it."""
        self.opaque_depth += 1
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self.opaque_depth -= 1

    def _tensor_info(self, tensor: Tensor) -> TensorInfo:
        return TensorInfo(tensor.dtype, tuple(tensor.shape), tensor.device.type != self.device.type)

    def _describe_argument(self, argument: Any, sent: bool = False) -> OpArgument:
        if isinstance(argument, Tensor):
            value = self._tensor_info(argument)
            if value.on_host:
                # A number of the host's that is not sent becomes part of the graph.
                number = f"={argument.item()}" if argument.dim() == 0 and not sent else ""
                return OpArgument(f"{value}{number}", "", (value,))
            age = self.live.age(argument, len(self.phase_ops or ()), self.source)
            text = self.tensor_texts.get(value) or self.tensor_texts.setdefault(value, str(value))
            return OpArgument(text, f"@{age}+{argument.storage_offset()}{argument.stride()}", (value,))
        if isinstance(argument, str):
            return OpArgument(self.groups.get(argument, argument))
        if isinstance(argument, (list, tuple)):
            parts = [self._describe_argument(each) for each in argument]
            inner = ", ".join(part.text for part in parts)
            values = tuple(value for part in parts for value in part.tensors)
            return OpArgument(f"[{inner}]", " ".join(part.detail for part in parts), values)
        if isinstance(argument, (int, float, complex, torch.dtype, type(None))):
            return OpArgument(str(argument).removeprefix("torch."))
        if isinstance(argument, (torch.device, torch.layout, torch.memory_format)):
            return OpArgument("")
        try:
            return OpArgument(self.groups.get(dist.ProcessGroup.unbox(argument).group_name, "group"))
        except (RuntimeError, TypeError, AttributeError):  # not a group
            return OpArgument(type(argument).__name__)


def _depends_on_values(function: Any, arguments: list[OpArgument]) -> bool:
    """Indexing gives a shape that depends on values only where the index is a mask."""
    if function is not torch.ops.aten.index.Tensor:
        return True
    return any(value.dtype in (torch.bool, torch.uint8) for value in arguments[1].tensors)

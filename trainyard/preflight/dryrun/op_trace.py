"""A trace of the operators of a rank, with dtypes, shapes, source lines and live memory.

To make traces comparable, an operator is recorded as text in which a tensor is identified by how long ago its memory
was last used, a process group by its name in the mesh, and a number by its value. Equal texts at the same index mean
equal graphs.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from trainyard import compat
from trainyard.parallel.mesh import Mesh
from trainyard.preflight.dryrun.live_memory import LiveBytes
from trainyard.preflight.dryrun.meta_ops import FUSED_ADAMW, TraceAborted, run_on_meta, tensors_in, unfused_adamw
from trainyard.preflight.dryrun.source_lines import SourceLocation, SourceLocator

MESH_GROUPS = ("tp", "cp", "pp", "expert_dp", "dp_cp", "ep", "dp_cp_tp", "world", "kv_replicas", "tied_embedding")
PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter)
PRINT_OP = "python.print"
"""Name of the conversion of a tensor to text in a trace."""
HOST_TO_DEVICE_OPS = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class PrintFunction:
    """Stands for the conversion of a tensor to text, which reads its values and is no operator of torch."""

    tags = (torch.Tag.data_dependent_output,)

    def __str__(self) -> str:
        return PRINT_OP


class TensorInfo(NamedTuple):
    """A tensor on the device or on the host."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_host: bool

    def __str__(self) -> str:
        host = "host " if self.on_host else ""
        return f"{host}{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class OpArgument(NamedTuple):
    text: str
    """The argument as shown to the user."""
    detail: str = ""
    """What else a comparison of traces must see: age, offset and strides of tensors."""
    tensors: tuple[TensorInfo, ...] = ()


@dataclass(frozen=True)
class TracedOp:
    name: str
    """Name in torch, such as aten.mm."""
    arguments: tuple[OpArgument, ...]
    results: tuple[TensorInfo, ...]
    text: str
    """Shapes, dtypes and numbers, as shown to the user."""
    detail: str
    """`text` with the memory of each tensor, for comparisons."""
    source: SourceLocation
    dynamic_shape: bool
    """The shape of the result depends on values."""
    reads_to_host: bool
    """The host waits for a value."""
    draws_random_numbers: bool
    """torch's own random numbers."""
    group: str | None
    """The process group of a collective."""


class ForwardSegment(NamedTuple):
    """The operators of a model's forward pass: a range of a phase."""

    phase: str
    model: int
    start: int
    end: int


@dataclass
class RankTrace:
    rank: int
    stage: int
    operations: list[TracedOp] = field(default_factory=list)
    """Distinct operators."""
    phases: dict[str, list[int]] = field(default_factory=dict)
    """Indices of operators in execution order, for step 1, step 2, ..., evaluation."""
    segments: list[ForwardSegment] = field(default_factory=list)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks of each process group."""
    peak_bytes: int = 0
    """Most live bytes on the device in the last step."""
    peak_location: str = ""
    """FILE:LINE at the peak."""
    steady_bytes: int = 0
    """Live bytes between steps."""
    abort_reason: str | None = None
    """Why the trace ends early."""

    def texts(self, phase: str, start: int = 0, end: int | None = None) -> list[str]:
        return [self.operations[index].text for index in self.phases[phase][start:end]]

    def details(self, phase: str) -> list[str]:
        return [self.operations[index].detail for index in self.phases[phase]]

    def digest(self, phase: str) -> str:
        return blake2b("\n".join(self.details(phase)).encode(), digest_size=8).hexdigest()


class OpRecorder(compat.DispatchMode):  # type: ignore[no-untyped-call]
    """Records all operators between `phase` and its end while the mode is active."""

    def __init__(self, trace: RankTrace, mesh: Mesh, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace, self.device = trace, device
        groups = {name: getattr(mesh, name) for name in MESH_GROUPS}
        self.groups = {group.name: name for name, group in groups.items() if group.size > 1}
        trace.groups = {name: groups[name].ranks for name in self.groups.values()}
        self.locator, self.live = SourceLocator(), LiveBytes(device)
        self.phase_ops: list[int] | None = None
        self.phase_name = ""
        self.forward_starts: list[int] = []
        self.op_indices: dict[tuple[str, SourceLocation], int] = {}
        self.op_names: dict[Any, str] = {}
        self.tensor_texts: dict[TensorInfo, str] = {}
        self.source = SourceLocation()
        self.opaque_depth = 0
        """Nesting depth of operators that are a single operator of the graph around them."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phase_ops = self.trace.phases[name] = []
        self.phase_name = name
        self.live.begin_phase()
        yield
        self.phase_ops = None
        if name.startswith("step"):
            self.trace.peak_bytes, self.trace.steady_bytes = self.live.peak, self.live.current
            self.trace.peak_location = str(self.live.peak_location)

    @contextmanager
    def record_prints(self) -> Iterator[None]:
        """Record conversions of tensors to text, by print, f-strings or repr."""
        function, to_text = PrintFunction(), Tensor.__repr__

        def record(tensor: Tensor, **options: Any) -> str:
            if tensor.device.type == self.device.type and type(tensor) in PLAIN_TENSOR_TYPES:
                source = self.locator.locate(sys._getframe(1))
                self._record_op(function, [self._describe_argument(tensor)], None, source, on_device=True)
            return str(to_text(tensor, **options))  # type: ignore[no-untyped-call]

        with patch.object(Tensor, "__repr__", record):
            yield

    def begin_forward(self) -> None:
        """The forward pass of a model begins."""
        self.forward_starts.append(len(self.phase_ops or ()))

    def end_forward(self, model: int) -> None:
        start = self.forward_starts.pop()
        if self.phase_ops is not None:
            self.trace.segments.append(ForwardSegment(self.phase_name, model, start, len(self.phase_ops)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(tensor_type not in PLAIN_TENSOR_TYPES for tensor_type in types):
            return NotImplemented  # a tensor subclass: its operators on plain tensors are dispatched next
        kwargs = kwargs or {}
        source = self.source = self.locator.locate(sys._getframe(1))
        # Arguments are described first, because the operator may change them.
        to_device = function in HOST_TO_DEVICE_OPS
        arguments = [self._describe_argument(argument, to_device) for argument in (*args, *kwargs.values())]
        on_device = any(not tensor.on_host for argument in arguments for tensor in argument.tensors)
        try:
            out = self._run_op(function, args, kwargs) if on_device else function(*args, **kwargs)
        except TraceAborted:
            self._record_op(function, arguments, None, source, on_device)
            raise
        results = [tensor for tensor in tensors_in(out) if tensor.device.type == self.device.type]
        if on_device or results:  # otherwise the operator ran on the host
            self._record_op(function, arguments, out, source, on_device)
            for tensor in results:
                self.live.track(tensor, source)
        return out

    def _record_op(
        self, function: Any, arguments: list[OpArgument], out: Any, source: SourceLocation, on_device: bool
    ) -> None:
        if self.phase_ops is None:
            return
        name = self.op_names.get(function) or self.op_names.setdefault(function, str(function).removesuffix(".default"))
        text = f"{name}({', '.join(argument.text for argument in arguments if argument.text)})"
        detail = f"{text} {' '.join(argument.detail for argument in arguments)}"
        index = self.op_indices.get((detail, source))
        if index is None:
            index = self.op_indices[detail, source] = len(self.trace.operations)
            results = tuple(self._tensor_info(tensor) for tensor in tensors_in(out))
            copies_to_host = on_device and any(tensor.on_host for tensor in results)
            op = TracedOp(
                name=name,
                arguments=tuple(arguments),
                results=results,
                text=f"{text} -> {', '.join(map(str, results))}" if results else text,
                detail=detail,
                source=source,
                dynamic_shape=torch.Tag.dynamic_output_shape in function.tags
                and _depends_on_values(function, arguments),
                reads_to_host=copies_to_host or torch.Tag.data_dependent_output in function.tags,
                draws_random_numbers=torch.Tag.nondeterministic_seeded in function.tags,
                group=next((argument.text for argument in arguments if argument.text in self.trace.groups), None),
            )
            self.trace.operations.append(op)
        if not self.opaque_depth:
            self.phase_ops.append(index)

    def _run_op(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function is FUSED_ADAMW:
            # Trainium compiles the unfused update into one pass, whose intermediate results need no memory.
            peak = self.live.peak, self.live.peak_location
            self._run_opaque(unfused_adamw, args, kwargs)
            self.live.peak, self.live.peak_location = peak
            return None
        return run_on_meta(function, args, kwargs, self.device)

    def _run_opaque(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Check the operators inside an opaque operator without adding them to the graph around it."""
        self.opaque_depth += 1
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self.opaque_depth -= 1

    def _tensor_info(self, tensor: Tensor) -> TensorInfo:
        return TensorInfo(tensor.dtype, tuple(tensor.shape), tensor.device.type != self.device.type)

    def _describe_argument(self, argument: Any, to_device: bool = False) -> OpArgument:
        if isinstance(argument, Tensor):
            info = self._tensor_info(argument)
            if info.on_host:
                # A host scalar that is not copied to the device becomes a constant of the graph.
                constant = f"={argument.item()}" if argument.dim() == 0 and not to_device else ""
                return OpArgument(f"{info}{constant}", "", (info,))
            age = self.live.age(argument, len(self.phase_ops or ()), self.source)
            text = self.tensor_texts.get(info) or self.tensor_texts.setdefault(info, str(info))
            return OpArgument(text, f"@{age}+{argument.storage_offset()}{argument.stride()}", (info,))
        if isinstance(argument, str):
            return OpArgument(self.groups.get(argument, argument))
        if isinstance(argument, (list, tuple)):
            items = [self._describe_argument(item) for item in argument]
            text = ", ".join(item.text for item in items)
            tensors = tuple(tensor for item in items for tensor in item.tensors)
            return OpArgument(f"[{text}]", " ".join(item.detail for item in items), tensors)
        if isinstance(argument, (int, float, complex, torch.dtype, type(None))):
            return OpArgument(str(argument).removeprefix("torch."))
        if isinstance(argument, (torch.device, torch.layout, torch.memory_format)):
            return OpArgument("")
        try:
            return OpArgument(self.groups.get(dist.ProcessGroup.unbox(argument).group_name, "group"))
        except (RuntimeError, TypeError, AttributeError):  # not a process group
            return OpArgument(type(argument).__name__)


def _depends_on_values(function: Any, arguments: list[OpArgument]) -> bool:
    """Indexing has a shape that depends on values only if the index is a mask."""
    if function is not torch.ops.aten.index.Tensor:
        return True
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in arguments[1].tensors)

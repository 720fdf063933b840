"""Observe and fake what torch executes: dispatch modes, autograd nodes, fake tensors (torch 2.11 to 2.14)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType, ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

DispatchMode = TorchDispatchMode
"""A mode that receives every operator, below autograd."""


class EagerDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A DispatchMode outside compiled code, without the import of torch's compiler that the others cost."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def last_forward_node_id() -> int:
    """Id of the autograd node that this thread created last: during an operator's forward, its own node."""
    return torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]


def current_backward_node_id() -> int | None:
    """Id of the autograd node that is running backward; None outside a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def disable_torch_functions() -> AbstractContextManager[Any]:
    """Skip every TorchFunctionMode and `__torch_function__`."""
    return torch._C.DisableTorchFunction()


def run_backward(out: torch.Tensor, gradient: torch.Tensor) -> None:
    """`out.backward(gradient)` inside a TorchFunctionMode, which then also applies to what the backward pass calls."""
    torch.autograd.graph._engine_run_backward(
        (out,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def fake_tensor_mode(stand_in: Callable[[Any, Any, Any], Any], not_replaced: object) -> Any:
    """A FakeTensorMode: tensors have a device and a shape but no memory.

    `stand_in(function, args, kwargs)` returns the result of operators that torch has no rule for, and `not_replaced`
    for all others. This patches an instance instead of subclassing, because torch looks up some rules by the exact
    class of the mode.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    default_dispatch = mode.__torch_dispatch__

    def dispatch(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = stand_in(function, args, kwargs)
        return default_dispatch(function, types, args, kwargs) if out is not_replaced else out

    mode.__torch_dispatch__ = MethodType(dispatch, mode)  # type: ignore[method-assign]
    return mode


def has_memory(x: torch.Tensor) -> bool:
    """False for tensors that have only a shape: fake ones, and those on the meta device."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def unknown_size(estimate: int) -> int:
    """In the rule of a custom operator for fake tensors: a size that depends on values, where the tracer knows such
    sizes, else an estimate of it (torch 2.11 to 2.14)."""
    try:
        context = torch.library.get_ctx()
    except RuntimeError:  # the meta device
        return estimate
    if context._shape_env is None:
        return estimate
    return context.new_dynamic_size()  # type: ignore[return-value]


def tensor_without_memory(cls: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a subclass that has no memory and implements `__torch_dispatch__`."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def call_as_plain_tensor(function: Any, args: Any, kwargs: Any) -> Any:
    """Call a torch function from `__torch_function__`, without the conversion of its result to the subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def custom_op_body(op: Any) -> Callable[..., Any]:
    """The Python function of a custom operator, without the operator's rules for autograd and fake tensors."""
    return op._init_fn


def disable_fake_tensors() -> AbstractContextManager[Any]:
    """Create tensors with memory, even inside `fake_tensor_mode`."""
    return _disable_current_modes()


def register_device_module(name: str) -> None:
    """Register an empty module for a device without one, which torch.utils.checkpoint requires (torch 2.9 with
    torch_xla). Nothing in it is used as long as no RNG state is saved."""
    if not hasattr(torch, name):
        torch._register_device_module(name, ModuleType(f"torch.{name}"))  # type: ignore[no-untyped-call]

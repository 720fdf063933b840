"""Observe and fake what torch executes: dispatch modes, autograd nodes, fake tensors (torch 2.11 to 2.14)."""

from contextlib import AbstractContextManager
from types import MethodType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DispatchMode = TorchDispatchMode
"""A mode that receives every operator, below autograd."""


def last_forward_node_id() -> int:
    """Id of the autograd node that this thread created last: during an operator's forward, its own node."""
    return torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]


def current_backward_node_id() -> int | None:
    """Id of the autograd node that is running backward; None outside a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def fake_tensor_mode() -> Any:
    """A FakeTensorMode: tensors have a device and a shape but no memory.

    Adds rules for operators that torch has none for. It patches an instance instead of subclassing, because torch looks
    up some rules by the exact class of the mode.
    """
    from torch._C._distributed_c10d import FakeWork
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    default_dispatch = mode.__torch_dispatch__

    def dispatch(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._fused_adamw_.tensor_lr:
            return None
        if function is torch.ops.aten.addmm.dtype_out:  # torch 2.11 mistakes the dtype for a factor
            return kwargs["out"]
        if function is torch.ops.aten._local_scalar_dense.default:
            # A tensor made from a Python number keeps its value: dynamo's guards compare floats through tensors, and
            # any other value would make every block with a float a graph of its own.
            constant = args[0].constant if isinstance(args[0], FakeTensor) else None
            return constant.item() if constant is not None else 1.0 if args[0].dtype.is_floating_point else 1
        if function.namespace == "c10d":  # collectives do nothing
            work = FakeWork().boxed()
            return work if len(function._schema.returns) == 1 else (args[0], work)
        return default_dispatch(function, types, args, kwargs)

    mode.__torch_dispatch__ = MethodType(dispatch, mode)  # type: ignore[method-assign]
    return mode


def disable_fake_tensors() -> AbstractContextManager[Any]:
    """Create tensors with memory, even inside `fake_tensor_mode`."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def register_device_module(name: str) -> None:
    """Register an empty module for a device without one, which torch.utils.checkpoint requires (torch 2.9 with
    torch_xla). Nothing in it is used as long as no RNG state is saved."""
    if not hasattr(torch, name):
        torch._register_device_module(name, ModuleType(f"torch.{name}"))  # type: ignore[no-untyped-call]

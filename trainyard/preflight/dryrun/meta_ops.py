"""Stand-ins for operators that tensors without memory cannot run: the only place with rules for such devices."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainyard import compat
from trainyard.train.optim.updates.adamw import adamw_

MAX_HOST_ELEMENTS = 1 << 24
"""Most elements of the inputs of an operator that is computed in host memory instead."""
FUSED_ADAMW = torch.ops.aten._fused_adamw_.tensor_lr
NOT_REPLACED = object()
"""Result of `stand_in` for operators that run as they are."""


class TraceAborted(Exception):
    """The step cannot be traced further."""


def stand_in(function: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator that has no rule for tensors without memory, or NOT_REPLACED."""
    if function is FUSED_ADAMW:  # in place
        return None
    if function is torch.ops.aten.addmm.dtype_out:  # torch 2.11 mistakes the dtype for a factor
        return kwargs["out"]
    if function is torch.ops.aten._local_scalar_dense.default:
        # A fake tensor made of a Python number keeps its value: dynamo's guards compare floats through tensors, and any
        # other value would make every block with a float a graph of its own.
        constant = getattr(args[0], "constant", None)
        return constant.item() if constant is not None else 1.0 if args[0].dtype.is_floating_point else 1
    if function.namespace == "c10d":  # messages go nowhere
        work = compat.completed_work()
        return work if len(function._schema.returns) == 1 else (args[0], work)
    return NOT_REPLACED


def fake_tensor_mode() -> Any:
    """torch's FakeTensorMode, in which tensors have a device and a shape but no memory, with these stand-ins."""
    return compat.fake_tensor_mode(stand_in, NOT_REPLACED)


def run_on_meta(function: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Run an operator on shapes. An operator whose result does not follow from shapes runs on ones in host memory."""
    out = stand_in(function, args, kwargs)
    if out is not NOT_REPLACED:
        return out
    try:
        return function(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        reason = f"{function}: {' '.join(str(error).split())[:200]}"
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.device.type == device.type]
        if sum(tensor.numel() for tensor in inputs) > MAX_HOST_ELEMENTS:
            raise TraceAborted(reason) from error
        to_host = kwargs.get("device") is not None or function is torch.ops.aten.copy_.default
        try:
            args, kwargs = map_tensors((args, kwargs), lambda tensor: torch.ones(tensor.shape, dtype=tensor.dtype))
            out = function(*args, **kwargs)
        except Exception:
            raise TraceAborted(reason) from error
        return out if to_host else map_tensors(out, lambda tensor: torch.empty_like(tensor, device=device))


def unfused_adamw(args: Any, kwargs: Any) -> None:
    """The AdamW of `train/optim/` on the arguments of torch's fused kernel, which only CPUs and GPUs have."""
    (weight,), (gradient,), (exp_avg,), (exp_avg_sq,) = args[:4]
    step = args[5][0]
    correction = torch.stack((step, step))
    finite = kwargs["found_inf"] == 0
    options = (kwargs["weight_decay"], kwargs["beta1"], kwargs["beta2"], kwargs["eps"])
    scalars = (kwargs["lr"], kwargs["grad_scale"], correction, finite)
    adamw_(weight, weight, gradient, (exp_avg, exp_avg_sq), scalars, options)


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [tensor for item in tree for tensor in tensors_in(item)] if isinstance(tree, (list, tuple)) else []


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to all tensors in nested lists, tuples and dicts."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {name: map_tensors(item, change) for name, item in tree.items()}
    return type(tree)(map_tensors(item, change) for item in tree) if isinstance(tree, (list, tuple)) else tree

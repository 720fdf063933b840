"""Operators that cannot run on shapes alone, and what is done instead."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainyard import compat
from trainyard.train.optim.update_rules import adamw_

MAX_HOST_ELEMENTS = 1 << 24
"""Elements for which an operator is really computed."""
FUSED_ADAMW = torch.ops.aten._fused_adamw_.tensor_lr
POINT_TO_POINT_OPS = {torch.ops.c10d.send.default, torch.ops.c10d.recv_.default}


class TraceAborted(Exception):
    """The step cannot be followed further."""


def unfused_adamw(args: Any, kwargs: Any) -> None:
    """`train/optim/update_rules.py`'s AdamW on what torch's fused one was given, which is a kernel of CPUs and GPUs."""
    (weight,), (gradient,), (first,), (second,) = args[:4]
    lr, updates = kwargs["lr"], args[5][0]
    correct = torch.stack((updates, updates))
    ok = kwargs["found_inf"] == 0
    numbers = (kwargs["weight_decay"], kwargs["beta1"], kwargs["beta2"], kwargs["eps"])
    adamw_(weight, weight, gradient, first, second, lr, kwargs["grad_scale"], correct, ok, *numbers)


def run_on_meta(function: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """An operator on shapes. Where shapes do not say what comes out, on ones in the host's memory."""
    if function in POINT_TO_POINT_OPS:
        return compat.completed_work()
    try:
        return function(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        reason = f"{function}: {' '.join(str(error).split())[:200]}"
        if (
            sum(each.numel() for each in tensors_in((args, kwargs)) if each.device.type == device.type)
            > MAX_HOST_ELEMENTS
        ):
            raise TraceAborted(reason) from error
        to_host = kwargs.get("device") is not None or function is torch.ops.aten.copy_.default
        try:
            args, kwargs = map_tensors((args, kwargs), lambda each: torch.ones(each.shape, dtype=each.dtype))
            out = function(*args, **kwargs)
        except Exception:
            raise TraceAborted(reason) from error
        return out if to_host else map_tensors(out, lambda each: torch.empty_like(each, device=device))


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor in lists, tuples and mappings."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [tensor for each in tree for tensor in tensors_in(each)] if isinstance(tree, (list, tuple)) else []


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {name: map_tensors(each, change) for name, each in tree.items()}
    return type(tree)(map_tensors(each, change) for each in tree) if isinstance(tree, (list, tuple)) else tree

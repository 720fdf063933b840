"""Functions of the user's own: found by `module:function`, and held to what they must give."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainyard.core.errors import UserError


def import_function(dotted: str, key: str) -> Callable[..., Any]:
    """The function that `module:function` names; the current directory is searched too."""
    module, _, name = dotted.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise UserError(f"{key}={dotted}: cannot import {module}: {error}") from None
    if not callable(function):
        raise UserError(f"{key}={dotted}: {module} has no function {name}")
    return function


def check_sum_and_count(result: Any, function: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """What a user's loss or metric must give: (sum, count)."""
    name = getattr(function, "__name__", str(function))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
        raise UserError(f"{name}: gave {type(result).__name__}; a loss or metric gives (sum, count), the sum a tensor")
    total, count = result
    if total.numel() != 1:
        raise UserError(f"{name}: its sum has shape {list(total.shape)}; give the sum over all counted elements")
    return total.float().reshape(()), torch.as_tensor(count, device=total.device).float().reshape(())

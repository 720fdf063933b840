"""The functions of the user: given as arguments or named in the configuration, with checks of their results."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainyard.core.errors import UserError
from trainyard.core.user_code import import_function


def user_function(function: Callable[..., Any] | None, dotted: str | None, key: str) -> Callable[..., Any] | None:
    """The function given as an argument, else the one that the config key `key` names; None if there is neither."""
    return function or (import_function(dotted, key) if dotted else None)


def check_sum_and_count(result: Any, function: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """Check that a user's loss or metric returned (sum, count), and convert both to fp32 scalars."""
    name = getattr(function, "__name__", str(function))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
        raise UserError(
            f"{name}: returned {type(result).__name__}; a loss or metric must return (sum, count), the sum as a tensor"
        )
    total, count = result
    if total.numel() != 1:
        raise UserError(f"{name}: its sum has shape {list(total.shape)}; return the sum over all counted elements")
    return total.float().reshape(()), torch.as_tensor(count, device=total.device).float().reshape(())


def check_named_numbers(result: Any) -> dict[str, float]:
    """Check that a user's evaluation returned numbers by name."""
    if not isinstance(result, Mapping):
        raise UserError(
            f"evaluation function: returned {type(result).__name__}; it must return a mapping of name to number"
        )
    return {str(name): float(value) for name, value in result.items()}

"""The values that a foreign pickle may build, and the limits that keep it harmless.

A small file can ask for huge resources: nested lists that share elements and unfold to more values than fit in memory,
a key whose hash takes years, a long string that is copied a million times. Everything read is checked against these
limits.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

MAX_VALUES = 10_000_000
"""Maximum opcodes of a pickle, and maximum values in its object, counted as a tree."""
MAX_COPIED_BYTES = 2**31
"""Maximum bytes that calls may copy; a value in a container counts as 64."""
MAX_DEPTH = 100
"""Maximum nesting of containers."""
_MAX_KEY_ITEMS = 16
"""Maximum values in a tuple that is a dict key."""


class StubObject:
    """The name of a class or function that was not loaded, or of an instance. Operations on it do nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}, not loaded>"


class AllowedGlobal(StubObject):
    """A name of the allowlist. `call` replaces calling the function or creating an instance; None: not callable."""

    def __init__(self, name: str, call: Callable[..., Any] | None = None) -> None:
        super().__init__(name)
        self.call = call


_KEY_TYPES = (str, int, float, complex, bool, bytes, type(None), torch.dtype, torch.device, StubObject)


def check_key(value: Any) -> Any:
    """Refuse dict keys and set members that are expensive to hash or chosen to collide (as large ints can be)."""
    items = value if type(value) in (tuple, torch.Size) else (value,)
    if len(items) > _MAX_KEY_ITEMS or any(
        type(item) not in _KEY_TYPES or (type(item) is int and abs(item) >= 2**60) for item in items
    ):
        raise ValueError(f"a {type(value).__name__} is used as a key")
    return value


def describe(value: Any) -> str:
    """A short description for error messages. A repr of a nested value can be endless."""
    return value.name if isinstance(value, StubObject) else f"a {type(value).__name__}"


def copy_cost(value: Any, depth: int = 2) -> int:
    """Bytes charged for copying an argument and, if it is a tuple, its items."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, tuple) and depth:
        return 64 * len(value) + sum(copy_cost(item, depth - 1) for item in value)
    return 64 * len(value) if isinstance(value, tuple | list | dict | set | frozenset) else 64


def check_bounds(value: Any) -> None:
    """Refuse cycles, deep nesting and shared containers that unfold to too many values, so that callers may recurse."""
    count = 0
    levels: list[Iterator[Any]] = [iter((value,))]
    while levels:
        for item in levels[-1]:
            count += 1
            if isinstance(item, dict | list | tuple):
                levels.append(iter(item.values() if isinstance(item, dict) else item))
                break
        else:
            levels.pop()
        if len(levels) > MAX_DEPTH or count > MAX_VALUES:
            raise ValueError(f"containers nested more than {MAX_DEPTH} deep, or more than {MAX_VALUES} values")

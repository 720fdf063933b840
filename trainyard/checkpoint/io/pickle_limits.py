"""What a foreign pickle may build, and the bounds that keep it harmless.

A file can be small and still ask for the world: lists of lists that unfold to more values than there is memory for,
a key whose hash takes years, a long text that is copied a million times. Whatever is read is held against these bounds.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

MAX_VALUES = 10_000_000
"""Opcodes in a pickle, and values in what it builds, counted as a tree."""
MAX_COPIED_BYTES = 2**31
"""Bytes that calls may copy; a value in a container counts as 64."""
MAX_DEPTH = 100
"""Containers inside containers."""
_MAX_KEY_ITEMS = 16
"""Values in a tuple that is a key."""


class StubObject:
    """A class or function, or what one made, as a name only. Whatever a pickle does with it does nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}, not loaded>"


class AllowedGlobal(StubObject):
    """A name of the table; `call` is what a pickle gets when it calls the function or makes an instance."""

    def __init__(self, name: str, call: Callable[..., Any] | None = None) -> None:
        super().__init__(name)
        self.call = call


_KEY_TYPES = (str, int, float, complex, bool, bytes, type(None), torch.dtype, torch.device, StubObject)


def check_key(value: Any) -> Any:
    """A value that may be a key or in a set: hashed in a few steps, and not made to collide (great integers do)."""
    items = value if type(value) in (tuple, torch.Size) else (value,)
    if len(items) > _MAX_KEY_ITEMS or any(
        type(each) not in _KEY_TYPES or (type(each) is int and abs(each) >= 2**60) for each in items
    ):
        raise ValueError(f"a {type(value).__name__} is used as a key")
    return value


def describe(value: Any) -> str:
    """For a message. Never a repr: that of a nested value can be endless."""
    return value.name if isinstance(value, StubObject) else f"a {type(value).__name__}"


def copy_cost(value: Any, depth: int = 2) -> int:
    """Of copying an argument, and those inside it if it is a tuple."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, tuple) and depth:
        return 64 * len(value) + sum(copy_cost(each, depth - 1) for each in value)
    return 64 * len(value) if isinstance(value, tuple | list | dict | set | frozenset) else 64


def check_bounds(value: Any) -> None:
    """Whoever walks the value later walks a small tree: no cycles, no depths, no sharing that unfolds without end."""
    count = 0
    levels: list[Iterator[Any]] = [iter((value,))]
    while levels:
        for each in levels[-1]:
            count += 1
            if isinstance(each, dict | list | tuple):
                levels.append(iter(each.values() if isinstance(each, dict) else each))
                break
        else:
            levels.pop()
        if len(levels) > MAX_DEPTH or count > MAX_VALUES:
            raise ValueError(f"containers nested more than {MAX_DEPTH} deep, or more than {MAX_VALUES} values")

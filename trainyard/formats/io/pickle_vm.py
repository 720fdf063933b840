"""Interprets a pickle as data: a virtual machine for its opcodes that can only build plain values.

Python's unpickler is not safe, not even with a restricted `find_class`: a few bytes make it reserve gigabytes (it
trusts memo indices and lengths before it checks them), BUILD overwrites attributes of any object that `find_class`
returns, and the hash of a deeply nested key crashes the process. Here, nothing foreign is imported or called: calls go
to functions of an allowlist, keys are simple values, memory is bounded by the size of the file, and the number of
opcodes and the depth of containers are limited. A small file can ask for huge resources: nested lists that share
elements and unfold to more values than fit in memory, a key whose hash takes years, a long string that is copied a
million times.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pickletools import genops
from typing import IO, Any

import numpy as np
import torch

MAX_VALUES = 4_000_000
"""Maximum opcodes of a pickle by default, and maximum values in its object, counted as a tree: a few seconds."""
MAX_COPIED_BYTES = 2**31
"""Maximum bytes that calls may copy; a value in a container counts as 64."""
MAX_DEPTH = 100
"""Maximum nesting of containers."""
MAX_MARKS = 10 * MAX_DEPTH
"""Maximum nesting of marks. A pickle has at most a few of them for each level of containers."""
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


@dataclass(frozen=True)
class UnpickleRules:
    """The meaning of globals, object states and persistent ids in a pickle."""

    find_global: Callable[[str, str], Any]
    """Maps a module and a name to a value (an AllowedGlobal, a StubObject or a plain value), or raises UserError."""
    state_setters: Mapping[type, Callable[[Any, Any], None]]
    """Functions that apply a state (opcode BUILD) to an object of exactly this type."""
    load_storage: Callable[[Any], Any]
    """Maps a persistent id to a storage."""
    max_opcodes: int | None = None
    """None: MAX_VALUES."""


def unpickle(stream: IO[bytes], rules: UnpickleRules) -> Any:
    """Return the value of the pickle at the stream's position, and leave the stream at the end of the pickle.

    A corrupt pickle raises ValueError, LookupError, TypeError, ArithmeticError or RuntimeError; a refused global raises
    what `find_global` raises.
    """
    vm, max_opcodes = _PickleVm(rules), rules.max_opcodes or MAX_VALUES
    collected = gc.isenabled()
    gc.disable()  # it would take most of the time if there are millions of containers
    try:
        for i, (opcode, argument, _) in enumerate(genops(stream)):
            if i == max_opcodes:
                raise ValueError(f"more than {i} opcodes in a pickle")
            if push := _PUSHED_VALUES.get(opcode.name):
                value = push(vm, argument)
                vm.stack.append(value)  # the value may have come with another stack
            else:
                _ACTIONS[opcode.name](vm, argument)
    finally:
        if collected:
            gc.enable()
    (value,) = vm.stack
    check_bounds(value)
    return value


class _PickleVm:
    def __init__(self, rules: UnpickleRules) -> None:
        self.rules = rules
        self.stack: list[Any] = []
        self.outer_stacks: list[list[Any]] = []  # the stack below each mark
        self.memo: dict[int, Any] = {}
        self.copied_bytes = 0

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        start = len(self.stack) - count
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def mark(self) -> None:
        if len(self.outer_stacks) == MAX_MARKS:
            raise ValueError(f"more than {MAX_MARKS} nested marks")
        self.outer_stacks.append(self.stack)
        self.stack = []

    def pop_to_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.outer_stacks.pop()
        return items

    def memoize(self, index: int | None) -> None:
        index = len(self.memo) if index is None else index
        if not 0 <= index < 2**32:
            raise ValueError("memo index out of range")
        self.memo[index] = self.stack[-1]

    def extend(self, kind: type, items: list[Any]) -> None:
        """Add items to the container on the stack. A stub ignores what is added to it."""
        container = self.stack[-1]
        if type(container) is kind:
            _ADD_ITEMS[kind](container, items)
        elif type(container) is not StubObject:
            raise ValueError(f"expected a {kind.__name__}, found {describe(container)}")

    def find_global(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str or len(module) + len(name) > 1000:
            raise ValueError("invalid global name")
        return self.rules.find_global(module, name)

    def call(self, function: Any, arguments: Any, kwargs: Any = None) -> Any:
        if type(function) is StubObject:
            return StubObject(function.name)
        if not isinstance(function, AllowedGlobal) or function.call is None or type(arguments) is not tuple or kwargs:
            raise ValueError(f"call of {describe(function)} with {describe(arguments)}")
        self.charge_copy(arguments)
        return function.call(*arguments)

    def call_unpacked(self, function: Any, *arguments: Any) -> Any:
        return self.call(function, arguments)

    def set_state(self, state: Any) -> None:
        target = self.stack[-1]
        setter = self.rules.state_setters.get(type(target))
        if setter is None:
            raise ValueError(f"state for {describe(target)}")
        self.charge_copy(state)
        setter(target, state)

    def charge_copy(self, arguments: Any) -> None:
        self.copied_bytes += copy_cost(arguments)
        if self.copied_bytes > MAX_COPIED_BYTES:
            raise ValueError("calls copy too many bytes")


def _key_value_pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return [(check_key(key), value) for key, value in zip(items[::2], items[1::2], strict=True)]


_ADD_ITEMS: dict[type, Callable[[Any, list[Any]], None]] = {
    list: list.extend,
    dict: lambda container, items: container.update(_key_value_pairs(items)),
    set: lambda container, items: container.update(map(check_key, items)),
}
_LITERAL_OPCODES = (
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES "
    "SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8"
)
# torch never writes the opcodes missing below: extension codes, out-of-band buffers, text persistent ids.
_PUSHED_VALUES: dict[str, Callable[[_PickleVm, Any], Any]] = {
    **dict.fromkeys(_LITERAL_OPCODES.split(), lambda _, argument: argument),
    "NONE": lambda *_: None,
    "NEWTRUE": lambda *_: True,
    "NEWFALSE": lambda *_: False,
    "EMPTY_LIST": lambda *_: [],
    "EMPTY_DICT": lambda *_: {},
    "EMPTY_SET": lambda *_: set(),
    "EMPTY_TUPLE": lambda *_: (),
    "LIST": lambda vm, _: vm.pop_to_mark(),
    "TUPLE": lambda vm, _: tuple(vm.pop_to_mark()),
    "TUPLE1": lambda vm, _: tuple(vm.pop(1)),
    "TUPLE2": lambda vm, _: tuple(vm.pop(2)),
    "TUPLE3": lambda vm, _: tuple(vm.pop(3)),
    "DICT": lambda vm, _: dict(_key_value_pairs(vm.pop_to_mark())),
    "FROZENSET": lambda vm, _: frozenset(map(check_key, vm.pop_to_mark())),
    "DUP": lambda vm, _: vm.stack[-1],
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda vm, index: vm.memo[index]),
    "GLOBAL": lambda vm, names: vm.rules.find_global(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda vm, _: vm.find_global(*vm.pop(2)),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda vm, _: vm.call(*vm.pop(2))),
    "NEWOBJ_EX": lambda vm, _: vm.call(*vm.pop(3)),
    "OBJ": lambda vm, _: vm.call_unpacked(*vm.pop_to_mark()),
    "INST": lambda vm, names: vm.call_unpacked(vm.rules.find_global(*names.split(" ", 1)), *vm.pop_to_mark()),
    "BINPERSID": lambda vm, _: vm.rules.load_storage(*vm.pop(1)),
}
"""Opcodes that push a value, and the value."""
_ACTIONS: dict[str, Callable[[_PickleVm, Any], Any]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda *_: None),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _PickleVm.memoize),
    "APPEND": lambda vm, _: vm.extend(list, vm.pop(1)),
    "APPENDS": lambda vm, _: vm.extend(list, vm.pop_to_mark()),
    "SETITEM": lambda vm, _: vm.extend(dict, vm.pop(2)),
    "SETITEMS": lambda vm, _: vm.extend(dict, vm.pop_to_mark()),
    "ADDITEMS": lambda vm, _: vm.extend(set, vm.pop_to_mark()),
    "MARK": lambda vm, _: vm.mark(),
    "POP": lambda vm, _: vm.pop(1),
    "POP_MARK": lambda vm, _: vm.pop_to_mark(),
    "BUILD": lambda vm, _: vm.set_state(*vm.pop(1)),
}
"""The other opcodes."""

"""Interprets a pickle as data: a virtual machine for its opcodes that can only build plain values.

Python's unpickler is not safe, not even with a restricted `find_class`: a few bytes make it reserve gigabytes (it
trusts memo indices and lengths before it checks them), BUILD overwrites attributes of any object that `find_class`
returns, and the hash of a deeply nested key crashes the process. Here, nothing foreign is imported or called: calls go
to functions of an allowlist, keys are simple values, memory is bounded by the size of the file, and the number of
opcodes and the depth of containers are limited.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pickletools import genops
from typing import IO, Any

from trainyard.checkpoint.io import pickle_limits
from trainyard.checkpoint.io.pickle_limits import (
    AllowedGlobal,
    StubObject,
    check_bounds,
    check_key,
    copy_cost,
    describe,
)


@dataclass(frozen=True)
class UnpickleRules:
    """The meaning of globals, object states and persistent ids in a pickle."""

    find_global: Callable[[str, str], Any]
    """Maps a module and a name to a value (an AllowedGlobal, a StubObject or a plain value), or raises UserError."""
    state_setters: Mapping[type, Callable[[Any, Any], None]]
    """Functions that apply a state (opcode BUILD) to an object of exactly this type."""
    load_storage: Callable[[Any], Any]
    """Maps a persistent id to a storage."""


def unpickle(stream: IO[bytes], rules: UnpickleRules) -> Any:
    """Return the value of the pickle at the stream's position, and leave the stream at the end of the pickle.

    A corrupt pickle raises ValueError, LookupError, TypeError, ArithmeticError or RuntimeError; a refused global raises
    what `find_global` raises.
    """
    vm = _PickleVm(rules)
    for i, (opcode, argument, _) in enumerate(genops(stream)):
        if i == pickle_limits.MAX_VALUES:
            raise ValueError(f"more than {i} opcodes in a pickle")
        _OPCODE_HANDLERS[opcode.name](vm, argument)
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

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.outer_stacks.pop()
        return items

    def charge_copy(self, arguments: Any) -> None:
        self.copied_bytes += copy_cost(arguments)
        if self.copied_bytes > pickle_limits.MAX_COPIED_BYTES:
            raise ValueError("calls copy too many bytes")

    def call(self, function: Any, arguments: Any) -> Any:
        if type(function) is StubObject:
            return StubObject(function.name)
        if not isinstance(function, AllowedGlobal) or function.call is None or type(arguments) is not tuple:
            raise ValueError(f"call of {describe(function)} with {describe(arguments)}")
        self.charge_copy(arguments)
        return function.call(*arguments)


OpcodeHandler = Callable[[_PickleVm, Any], None]


def _mark(vm: _PickleVm, _: Any) -> None:
    vm.outer_stacks.append(vm.stack)
    vm.stack = []


def _tuple_of_last(count: int) -> OpcodeHandler:
    def handler(vm: _PickleVm, _: Any) -> None:
        if len(vm.stack) < count:
            raise IndexError("the stack is empty")
        start = len(vm.stack) - count
        vm.stack[start:] = [tuple(vm.stack[start:])]

    return handler


def _extend(
    kind: type, add: Callable[[Any, list[Any]], None], pop_items: Callable[[_PickleVm], list[Any]]
) -> OpcodeHandler:
    """Add items to the container below them on the stack. A stub ignores what is added to it."""

    def handler(vm: _PickleVm, _: Any) -> None:
        items = pop_items(vm)
        container = vm.stack[-1]
        if type(container) is kind:
            add(container, items)
        elif type(container) is not StubObject:
            raise ValueError(f"expected a {kind.__name__}, found {describe(container)}")

    return handler


def _pop_one(vm: _PickleVm) -> list[Any]:
    return [vm.pop()]


def _pop_two(vm: _PickleVm) -> list[Any]:
    value = vm.pop()
    return [vm.pop(), value]


def _key_value_pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return [(check_key(key), value) for key, value in zip(items[::2], items[1::2], strict=True)]


def _global(vm: _PickleVm, argument: Any) -> None:
    vm.push(vm.rules.find_global(*argument.split(" ", 1)))


def _stack_global(vm: _PickleVm, _: Any) -> None:
    module, name = _pop_two(vm)
    if type(module) is not str or type(name) is not str or len(module) + len(name) > 1000:
        raise ValueError("invalid global name")
    vm.push(vm.rules.find_global(module, name))


def _call(vm: _PickleVm, _: Any) -> None:
    vm.push(vm.call(*_pop_two(vm)))


def _call_with_kwargs(vm: _PickleVm, _: Any) -> None:
    kwargs = vm.pop()
    function, arguments = _pop_two(vm)
    if type(function) is not StubObject and kwargs != {}:
        raise ValueError(f"call of {describe(function)} with keyword arguments")
    vm.push(vm.call(function, arguments))


def _object(vm: _PickleVm, _: Any) -> None:
    function, *arguments = vm.pop_to_mark()
    vm.push(vm.call(function, tuple(arguments)))


def _instance(vm: _PickleVm, argument: Any) -> None:
    function = vm.rules.find_global(*argument.split(" ", 1))
    vm.push(vm.call(function, tuple(vm.pop_to_mark())))


def _build(vm: _PickleVm, _: Any) -> None:
    state, target = vm.pop(), vm.stack[-1]
    set_state = vm.rules.state_setters.get(type(target))
    if set_state is None:
        raise ValueError(f"state for {describe(target)}")
    vm.charge_copy(state)
    set_state(target, state)


def _memoize(vm: _PickleVm, index: Any) -> None:
    index = len(vm.memo) if index is None else index
    if not 0 <= index < 2**32:
        raise ValueError("memo index out of range")
    vm.memo[index] = vm.stack[-1]


def _pushes(make: Callable[[_PickleVm, Any], Any]) -> OpcodeHandler:
    return lambda vm, argument: vm.push(make(vm, argument))


# torch never writes the missing opcodes: extension codes, out-of-band buffers, text persistent ids.
_OPCODE_HANDLERS: dict[str, OpcodeHandler] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda vm, _: None),
    **dict.fromkeys(
        ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"), _PickleVm.push
    ),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"), _PickleVm.push),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _PickleVm.push),
    **dict.fromkeys(("BINBYTES8", "BYTEARRAY8"), _PickleVm.push),
    "NONE": _pushes(lambda *_: None),
    "NEWTRUE": _pushes(lambda *_: True),
    "NEWFALSE": _pushes(lambda *_: False),
    "EMPTY_LIST": _pushes(lambda *_: []),
    "EMPTY_DICT": _pushes(lambda *_: {}),
    "EMPTY_SET": _pushes(lambda *_: set()),
    "EMPTY_TUPLE": _pushes(lambda *_: ()),
    "LIST": _pushes(lambda vm, _: vm.pop_to_mark()),
    "TUPLE": _pushes(lambda vm, _: tuple(vm.pop_to_mark())),
    "DICT": _pushes(lambda vm, _: dict(_key_value_pairs(vm.pop_to_mark()))),
    "FROZENSET": _pushes(lambda vm, _: frozenset(map(check_key, vm.pop_to_mark()))),
    **{f"TUPLE{count}": _tuple_of_last(count) for count in (1, 2, 3)},
    "APPEND": _extend(list, list.extend, _pop_one),
    "APPENDS": _extend(list, list.extend, _PickleVm.pop_to_mark),
    "SETITEM": _extend(dict, lambda container, items: container.update(_key_value_pairs(items)), _pop_two),
    "SETITEMS": _extend(
        dict, lambda container, items: container.update(_key_value_pairs(items)), _PickleVm.pop_to_mark
    ),
    "ADDITEMS": _extend(set, lambda container, items: container.update(map(check_key, items)), _PickleVm.pop_to_mark),
    "MARK": _mark,
    "POP": lambda vm, _: vm.pop(),
    "POP_MARK": lambda vm, _: vm.pop_to_mark().clear(),
    "DUP": _pushes(lambda vm, _: vm.stack[-1]),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _memoize),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _pushes(lambda vm, index: vm.memo[index])),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _call,
    "NEWOBJ": _call,
    "NEWOBJ_EX": _call_with_kwargs,
    "OBJ": _object,
    "INST": _instance,
    "BUILD": _build,
    "BINPERSID": _pushes(lambda vm, _: vm.rules.load_storage(vm.pop())),
}

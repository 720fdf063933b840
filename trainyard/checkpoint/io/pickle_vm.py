"""A pickle read as data: a machine for its opcodes that can build plain values and nothing else.

Python's own unpickler is not used, not even with `find_class` narrowed down. A few bytes make it reserve gigabytes
(memo numbers and lengths are believed before they are checked), BUILD overwrites attributes of whatever `find_class`
hands out, and the hash of a deeply nested key ends the process. Here nothing foreign is ever imported or called: a call
goes to a table of our own functions, keys are simple values, memory is bounded by what the file holds, and the whole is
bounded in steps and in depth.
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
    """What names and states mean."""

    find_global: Callable[[str, str], Any]
    """A module and a name in it, as a value (a Known, an Inert, or the thing itself), or a UserError."""
    state_setters: Mapping[type, Callable[[Any, Any], None]]
    """By exact type, how an object takes its state."""
    load_storage: Callable[[Any], Any]
    """What a persistent id stands for."""


def unpickle(stream: IO[bytes], rules: UnpickleRules) -> Any:
    """The one value of the pickle that starts here; the stream is left at its end. What is damaged is a ValueError,
    LookupError, TypeError, ArithmeticError or RuntimeError; what is refused is what `find` raises."""
    machine = _PickleVm(rules)
    for number, (opcode, argument, _) in enumerate(genops(stream)):
        if number == pickle_limits.MAX_VALUES:
            raise ValueError(f"more than {number} opcodes in a pickle")
        _OPCODE_HANDLERS[opcode.name](machine, argument)
    (value,) = machine.stack
    check_bounds(value)
    return value


class _PickleVm:
    def __init__(self, rules: UnpickleRules) -> None:
        self.rules = rules
        self.stack: list[Any] = []
        self.outer_stacks: list[list[Any]] = []  # the stacks below each mark
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
            raise ValueError("the same values are copied over and over")

    def call(self, function: Any, arguments: Any) -> Any:
        if type(function) is StubObject:
            return StubObject(function.name)
        if not isinstance(function, AllowedGlobal) or function.call is None or type(arguments) is not tuple:
            raise ValueError(f"a call of {describe(function)} with {describe(arguments)}")
        self.charge_copy(arguments)
        return function.call(*arguments)


OpcodeHandler = Callable[[_PickleVm, Any], None]


def _mark(machine: _PickleVm, _: Any) -> None:
    machine.outer_stacks.append(machine.stack)
    machine.stack = []


def _tuple_of_last(count: int) -> OpcodeHandler:
    def step(machine: _PickleVm, _: Any) -> None:
        if len(machine.stack) < count:
            raise IndexError("the stack is empty")
        start = len(machine.stack) - count
        machine.stack[start:] = [tuple(machine.stack[start:])]

    return step


def _extend(
    kind: type, put: Callable[[Any, list[Any]], None], items: Callable[[_PickleVm], list[Any]]
) -> OpcodeHandler:
    """Into the container below the items. What was inert stays so, whatever is put into it."""

    def step(machine: _PickleVm, _: Any) -> None:
        new = items(machine)
        container = machine.stack[-1]
        if type(container) is kind:
            put(container, new)
        elif type(container) is not StubObject:
            raise ValueError(f"{describe(container)} where a {kind.__name__} was expected")

    return step


def _pop_one(machine: _PickleVm) -> list[Any]:
    return [machine.pop()]


def _pop_two(machine: _PickleVm) -> list[Any]:
    value = machine.pop()
    return [machine.pop(), value]


def _key_value_pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return [(check_key(name), value) for name, value in zip(items[::2], items[1::2], strict=True)]


def _global(machine: _PickleVm, argument: Any) -> None:
    machine.push(machine.rules.find_global(*argument.split(" ", 1)))


def _stack_global(machine: _PickleVm, _: Any) -> None:
    module, name = _pop_two(machine)
    if type(module) is not str or type(name) is not str or len(module) + len(name) > 1000:
        raise ValueError("a name that is none")
    machine.push(machine.rules.find_global(module, name))


def _call(machine: _PickleVm, _: Any) -> None:
    machine.push(machine.call(*_pop_two(machine)))


def _call_with_kwargs(machine: _PickleVm, _: Any) -> None:
    names = machine.pop()
    function, arguments = _pop_two(machine)
    if type(function) is not StubObject and names != {}:
        raise ValueError(f"a call of {describe(function)} with names")
    machine.push(machine.call(function, arguments))


def _object(machine: _PickleVm, _: Any) -> None:
    function, *arguments = machine.pop_to_mark()
    machine.push(machine.call(function, tuple(arguments)))


def _instance(machine: _PickleVm, argument: Any) -> None:
    function = machine.rules.find_global(*argument.split(" ", 1))
    machine.push(machine.call(function, tuple(machine.pop_to_mark())))


def _build(machine: _PickleVm, _: Any) -> None:
    state, target = machine.pop(), machine.stack[-1]
    fill = machine.rules.state_setters.get(type(target))
    if fill is None:
        raise ValueError(f"a state for {describe(target)}")
    machine.charge_copy(state)
    fill(target, state)


def _memoize(machine: _PickleVm, place: Any) -> None:
    place = len(machine.memo) if place is None else place
    if not 0 <= place < 2**32:
        raise ValueError("a memo number out of range")
    machine.memo[place] = machine.stack[-1]


def _pushes(make: Callable[[_PickleVm, Any], Any]) -> OpcodeHandler:
    return lambda machine, argument: machine.push(make(machine, argument))


# What is missing (extension codes, buffers out of band, text persistent ids) torch never writes.
_OPCODE_HANDLERS: dict[str, OpcodeHandler] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
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
    "LIST": _pushes(lambda machine, _: machine.pop_to_mark()),
    "TUPLE": _pushes(lambda machine, _: tuple(machine.pop_to_mark())),
    "DICT": _pushes(lambda machine, _: dict(_key_value_pairs(machine.pop_to_mark()))),
    "FROZENSET": _pushes(lambda machine, _: frozenset(map(check_key, machine.pop_to_mark()))),
    **{f"TUPLE{count}": _tuple_of_last(count) for count in (1, 2, 3)},
    "APPEND": _extend(list, list.extend, _pop_one),
    "APPENDS": _extend(list, list.extend, _PickleVm.pop_to_mark),
    "SETITEM": _extend(dict, lambda made, items: made.update(_key_value_pairs(items)), _pop_two),
    "SETITEMS": _extend(dict, lambda made, items: made.update(_key_value_pairs(items)), _PickleVm.pop_to_mark),
    "ADDITEMS": _extend(set, lambda made, items: made.update(map(check_key, items)), _PickleVm.pop_to_mark),
    "MARK": _mark,
    "POP": lambda machine, _: machine.pop(),
    "POP_MARK": lambda machine, _: machine.pop_to_mark().clear(),
    "DUP": _pushes(lambda machine, _: machine.stack[-1]),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _memoize),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _pushes(lambda machine, place: machine.memo[place])),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _call,
    "NEWOBJ": _call,
    "NEWOBJ_EX": _call_with_kwargs,
    "OBJ": _object,
    "INST": _instance,
    "BUILD": _build,
    "BINPERSID": _pushes(lambda machine, _: machine.rules.load_storage(machine.pop())),
}

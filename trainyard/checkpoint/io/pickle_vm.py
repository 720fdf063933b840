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
from trainyard.checkpoint.io.pickle_limits import Inert, Known, check_bounds, cost, described, key


@dataclass(frozen=True)
class Language:
    """What names and states mean."""

    find: Callable[[str, str], Any]
    """A module and a name in it, as a value (a Known, an Inert, or the thing itself), or a UserError."""
    fill: Mapping[type, Callable[[Any, Any], None]]
    """By exact type, how an object takes its state."""
    storage: Callable[[Any], Any]
    """What a persistent id stands for."""


def unpickle(stream: IO[bytes], language: Language) -> Any:
    """The one value of the pickle that starts here; the stream is left at its end. What is damaged is a ValueError,
    LookupError, TypeError, ArithmeticError or RuntimeError; what is refused is what `find` raises."""
    machine = _Machine(language)
    for number, (opcode, argument, _) in enumerate(genops(stream)):
        if number == pickle_limits.MOST:
            raise ValueError(f"more than {number} opcodes in a pickle")
        _STEPS[opcode.name](machine, argument)
    (value,) = machine.stack
    check_bounds(value)
    return value


class _Machine:
    def __init__(self, language: Language) -> None:
        self.language = language
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []  # the stacks below each mark
        self.memo: dict[int, Any] = {}
        self.copied = 0

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.outer.pop()
        return items

    def pay(self, arguments: Any) -> None:
        self.copied += cost(arguments)
        if self.copied > pickle_limits.MOST_COPIED:
            raise ValueError("the same values are copied over and over")

    def called(self, function: Any, arguments: Any) -> Any:
        if type(function) is Inert:
            return Inert(function.name)
        if not isinstance(function, Known) or function.call is None or type(arguments) is not tuple:
            raise ValueError(f"a call of {described(function)} with {described(arguments)}")
        self.pay(arguments)
        return function.call(*arguments)


Step = Callable[[_Machine, Any], None]


def _mark(machine: _Machine, _: Any) -> None:
    machine.outer.append(machine.stack)
    machine.stack = []


def _last(count: int) -> Step:
    def step(machine: _Machine, _: Any) -> None:
        if len(machine.stack) < count:
            raise IndexError("the stack is empty")
        start = len(machine.stack) - count
        machine.stack[start:] = [tuple(machine.stack[start:])]

    return step


def _extend(kind: type, put: Callable[[Any, list[Any]], None], items: Callable[[_Machine], list[Any]]) -> Step:
    """Into the container below the items. What was inert stays so, whatever is put into it."""

    def step(machine: _Machine, _: Any) -> None:
        new = items(machine)
        container = machine.stack[-1]
        if type(container) is kind:
            put(container, new)
        elif type(container) is not Inert:
            raise ValueError(f"{described(container)} where a {kind.__name__} was expected")

    return step


def _one(machine: _Machine) -> list[Any]:
    return [machine.pop()]


def _two(machine: _Machine) -> list[Any]:
    value = machine.pop()
    return [machine.pop(), value]


def _paired(items: list[Any]) -> list[tuple[Any, Any]]:
    return [(key(name), value) for name, value in zip(items[::2], items[1::2], strict=True)]


def _global(machine: _Machine, argument: Any) -> None:
    machine.push(machine.language.find(*argument.split(" ", 1)))


def _stack_global(machine: _Machine, _: Any) -> None:
    module, name = _two(machine)
    if type(module) is not str or type(name) is not str or len(module) + len(name) > 1000:
        raise ValueError("a name that is none")
    machine.push(machine.language.find(module, name))


def _call(machine: _Machine, _: Any) -> None:
    machine.push(machine.called(*_two(machine)))


def _call_with_names(machine: _Machine, _: Any) -> None:
    names = machine.pop()
    function, arguments = _two(machine)
    if type(function) is not Inert and names != {}:
        raise ValueError(f"a call of {described(function)} with names")
    machine.push(machine.called(function, arguments))


def _object(machine: _Machine, _: Any) -> None:
    function, *arguments = machine.since_mark()
    machine.push(machine.called(function, tuple(arguments)))


def _instance(machine: _Machine, argument: Any) -> None:
    function = machine.language.find(*argument.split(" ", 1))
    machine.push(machine.called(function, tuple(machine.since_mark())))


def _build(machine: _Machine, _: Any) -> None:
    state, target = machine.pop(), machine.stack[-1]
    fill = machine.language.fill.get(type(target))
    if fill is None:
        raise ValueError(f"a state for {described(target)}")
    machine.pay(state)
    fill(target, state)


def _remember(machine: _Machine, place: Any) -> None:
    place = len(machine.memo) if place is None else place
    if not 0 <= place < 2**32:
        raise ValueError("a memo number out of range")
    machine.memo[place] = machine.stack[-1]


def _pushes(make: Callable[[_Machine, Any], Any]) -> Step:
    return lambda machine, argument: machine.push(make(machine, argument))


# What is missing (extension codes, buffers out of band, text persistent ids) torch never writes.
_STEPS: dict[str, Step] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
    **dict.fromkeys(
        ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"), _Machine.push
    ),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"), _Machine.push),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _Machine.push),
    **dict.fromkeys(("BINBYTES8", "BYTEARRAY8"), _Machine.push),
    "NONE": _pushes(lambda *_: None),
    "NEWTRUE": _pushes(lambda *_: True),
    "NEWFALSE": _pushes(lambda *_: False),
    "EMPTY_LIST": _pushes(lambda *_: []),
    "EMPTY_DICT": _pushes(lambda *_: {}),
    "EMPTY_SET": _pushes(lambda *_: set()),
    "EMPTY_TUPLE": _pushes(lambda *_: ()),
    "LIST": _pushes(lambda machine, _: machine.since_mark()),
    "TUPLE": _pushes(lambda machine, _: tuple(machine.since_mark())),
    "DICT": _pushes(lambda machine, _: dict(_paired(machine.since_mark()))),
    "FROZENSET": _pushes(lambda machine, _: frozenset(map(key, machine.since_mark()))),
    **{f"TUPLE{count}": _last(count) for count in (1, 2, 3)},
    "APPEND": _extend(list, list.extend, _one),
    "APPENDS": _extend(list, list.extend, _Machine.since_mark),
    "SETITEM": _extend(dict, lambda made, items: made.update(_paired(items)), _two),
    "SETITEMS": _extend(dict, lambda made, items: made.update(_paired(items)), _Machine.since_mark),
    "ADDITEMS": _extend(set, lambda made, items: made.update(map(key, items)), _Machine.since_mark),
    "MARK": _mark,
    "POP": lambda machine, _: machine.pop(),
    "POP_MARK": lambda machine, _: machine.since_mark().clear(),
    "DUP": _pushes(lambda machine, _: machine.stack[-1]),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _remember),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _pushes(lambda machine, place: machine.memo[place])),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _call,
    "NEWOBJ": _call,
    "NEWOBJ_EX": _call_with_names,
    "OBJ": _object,
    "INST": _instance,
    "BUILD": _build,
    "BINPERSID": _pushes(lambda machine, _: machine.language.storage(machine.pop())),
}

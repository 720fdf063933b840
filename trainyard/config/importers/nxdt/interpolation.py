"""Interpolations in a foreign YAML tree, as OmegaConf resolves them: `${a.b}`, `${.sibling}`, `${multiply:${a}, ${b}}`.

Only what can be told from the file itself: resolvers that ask the machine (`${oc.env:HOME}`, `${now:...}`) are refused
by name. Trees are bounded, since a few aliases in YAML can unfold to any size, or to themselves.
"""

import re
from collections.abc import Callable
from math import prod
from typing import Any

from trainyard.core.errors import UserError

NODES, DEPTH = 20_000, 60
"""More than any configuration has."""
NUMBER = re.compile(r"[-+]?(\d+|\d+\.\d*|\.\d+|\d+(\.\d*)?[eE][-+]?\d+)")
RESOLVERS: dict[str, Callable[[list[Any]], Any]] = {"multiply": prod}


def resolve(tree: dict[str, Any]) -> dict[str, Any]:
    """The same tree with every interpolation replaced by its value."""
    out = _Resolver(tree).node(tree, ())
    assert isinstance(out, dict)
    return out


class _Resolver:
    def __init__(self, root: dict[str, Any]) -> None:
        self.root, self.seen = root, 0
        self.open: list[str] = []
        """Interpolations on the way, to see a circle."""

    def node(self, value: Any, path: tuple[str, ...]) -> Any:
        self.seen += 1
        if self.seen > NODES or len(path) > DEPTH:
            raise UserError(f"{'.'.join(path[:4])}: too many or too deep values for a configuration")
        if isinstance(value, dict):
            return {str(name): self.node(each, (*path, str(name))) for name, each in value.items()}
        if isinstance(value, list):
            return [self.node(each, (*path, str(place))) for place, each in enumerate(value)]
        return self.text(value, path) if isinstance(value, str) and "${" in value else value

    def text(self, text: str, path: tuple[str, ...]) -> Any:
        """A text that is one interpolation has its value; one that holds some stays text."""
        pieces: list[Any] = []
        rest = text
        while "${" in rest:
            before, _, rest = rest.partition("${")
            inner, rest = _inner(rest, text, path)
            pieces += [before] if before else []
            pieces.append(self.value(inner, path))
        pieces += [rest] if rest else []
        return pieces[0] if len(pieces) == 1 else "".join(map(str, pieces))

    def value(self, inner: str, path: tuple[str, ...]) -> Any:
        name, colon, arguments = inner.partition(":")
        if colon and "${" not in name:
            return self.call(name.strip(), arguments, inner, path)
        inner = str(self.text(inner, path)).strip()
        if inner in self.open or len(self.open) > DEPTH:
            raise UserError(f"{'.'.join(path)}: ${{{inner}}}: leads back to itself")
        self.open.append(inner)
        where = self.absolute(inner, path)
        node: Any = self.root
        for part in where:
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            else:
                raise UserError(f"{'.'.join(path)}: ${{{inner}}}: there is no {'.'.join(where)}")
        found = self.node(node, where)
        self.open.pop()
        return found

    def absolute(self, inner: str, path: tuple[str, ...]) -> tuple[str, ...]:
        """`.x` is beside the key it stands in, `..x` one level above."""
        names = tuple(part for part in re.split(r"[.\[\]]", inner) if part)
        dots = len(inner) - len(inner.lstrip("."))
        return (*path[: max(len(path) - dots, 0)], *names) if dots else names

    def call(self, name: str, arguments: str, inner: str, path: tuple[str, ...]) -> Any:
        if name not in RESOLVERS:
            raise UserError(
                f"{'.'.join(path)}: ${{{inner}}}: the resolver {name} is not known here; write its value instead"
            )
        values = [self.text(each, path) if "${" in each else _number(each) for each in _split(arguments)]
        if not values or not all(isinstance(each, int | float) for each in values):
            raise UserError(f"{'.'.join(path)}: ${{{inner}}}: takes numbers")
        return RESOLVERS[name](values)


def _inner(rest: str, text: str, path: tuple[str, ...]) -> tuple[str, str]:
    """What stands before the brace that closes, and what after it."""
    depth = 1
    for place, each in enumerate(rest):
        depth += (each == "{") - (each == "}")
        if depth == 0:
            return rest[:place], rest[place + 1 :]
    raise UserError(f"{'.'.join(path)}={text[:60]}: a brace is not closed")


def _split(arguments: str) -> list[str]:
    """At commas outside braces."""
    out, depth = [""], 0
    for each in arguments:
        depth += (each == "{") - (each == "}")
        if each == "," and depth == 0:
            out.append("")
        else:
            out[-1] += each
    return [each.strip() for each in out if each.strip()]


def _number(text: str) -> object:
    if not NUMBER.fullmatch(text) or len(text) > 40:
        return text
    return int(text) if text.lstrip("+-").isdecimal() else float(text)

"""Interpolations of a foreign YAML tree with the semantics of OmegaConf: `${a.b}`, `${.sibling}`,
`${multiply:${a}, ${b}}`.

OmegaConf itself is not used: it expands without a limit (40 lines of `${x}${x}` exhaust memory), and its built-in
resolvers read the environment. Here the expansion is bounded, and only values of the file itself are available.
"""

import re
from math import prod
from typing import Any

from trainyard.core.errors import UserError

MAX_NODES, MAX_DEPTH = 20_000, 60
"""Far more than a configuration has; aliases of YAML and interpolations can expand to any size."""
NUMBER = re.compile(r"[-+]?(\d+|\d+\.\d*|\.\d+|\d+(\.\d*)?[eE][-+]?\d+)")
KeyPath = tuple[str, ...]


def resolve(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with every interpolation replaced by its value."""
    resolved = _Resolver(tree).resolve_node(tree, ())
    assert isinstance(resolved, dict)
    return resolved


class _Resolver:
    def __init__(self, root: dict[str, Any]) -> None:
        self.root, self.visited = root, 0
        self.pending: list[str] = []
        """References being resolved, to detect cycles."""

    def resolve_node(self, value: Any, path: KeyPath) -> Any:
        self.visited += 1
        if self.visited > MAX_NODES or len(path) > MAX_DEPTH:
            raise UserError(f"{'.'.join(path[:4])}: too many or too deeply nested values for a configuration")
        if isinstance(value, dict):
            return {str(name): self.resolve_node(child, (*path, str(name))) for name, child in value.items()}
        if isinstance(value, list):
            return [self.resolve_node(child, (*path, str(index))) for index, child in enumerate(value)]
        return self.resolve_text(value, path) if isinstance(value, str) and "${" in value else value

    def resolve_text(self, text: str, path: KeyPath) -> Any:
        """Return the value of a text that is one interpolation; join several values and plain text to a text."""
        values: list[Any] = []
        rest = text
        while "${" in rest:
            plain, _, rest = rest.partition("${")
            end = _closing_brace(rest)
            if end < 0:
                raise UserError(f"{'.'.join(path)}={text[:60]}: unclosed brace")
            expression, rest = rest[:end], rest[end + 1 :]
            values += [plain] if plain else []
            values.append(self.evaluate(expression, path))
        values += [rest] if rest else []
        return values[0] if len(values) == 1 else "".join(map(str, values))

    def evaluate(self, expression: str, path: KeyPath) -> Any:
        where = f"{'.'.join(path)}: ${{{expression}}}"
        resolver, colon, arguments = expression.partition(":")
        if colon and "${" not in resolver:
            if resolver.strip() != "multiply":
                raise UserError(f"{where}: resolver {resolver.strip()} is not supported; write its value instead")
            values = [self.resolve_text(text, path) if "${" in text else _number(text) for text in _split(arguments)]
            if not values or not all(isinstance(value, int | float) for value in values):
                raise UserError(f"{where}: takes numbers")
            return prod(values)
        reference = str(self.resolve_text(expression, path)).strip()
        if reference in self.pending or len(self.pending) > MAX_DEPTH:
            raise UserError(f"{where}: refers to itself")
        self.pending.append(reference)
        target = _absolute_path(reference, path)
        node: Any = self.root
        for name in target:
            if isinstance(node, dict) and name in node:
                node = node[name]
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                raise UserError(f"{where}: {'.'.join(target)} does not exist")
        value = self.resolve_node(node, target)
        self.pending.pop()
        return value


def _absolute_path(reference: str, path: KeyPath) -> KeyPath:
    """`.x` is a sibling of the key at `path`, `..x` is one level above."""
    names = tuple(name for name in re.split(r"[.\[\]]", reference) if name)
    dots = len(reference) - len(reference.lstrip("."))
    return (*path[: max(len(path) - dots, 0)], *names) if dots else names


def _closing_brace(text: str) -> int:
    depth = 1
    for index, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return index
    return -1


def _split(arguments: str) -> list[str]:
    """Split at commas outside braces."""
    parts, depth = [""], 0
    for char in arguments:
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def _number(text: str) -> object:
    if not NUMBER.fullmatch(text) or len(text) > 40:
        return text
    return int(text) if text.lstrip("+-").isdecimal() else float(text)

"""A shell script read, never run: its assignments and the words of its commands, as far as they stand in the text.

Enough of bash for launch scripts: quotes, comments, continued lines, arrays, `$X`, `${X:-default}`, `$((1 + 2))`. What
only running could tell (an unset variable, `$(command)`, `$1`) becomes UNKNOWN with its name, to be named in an
error if it is needed. Assignments inside if, for, while, case and functions may or may not happen, and are not made.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from trainyard.config.importers.shell.lexer import ShellWord, read_segment, split_words
from trainyard.core.errors import UserError

UNKNOWN_MARK = "\0"
"""Stands in a word on both sides of the name of what is not known."""
MAX_CHARS = 1_000_000
BLOCK_ENDS = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
BLOCK_ENDS |= {"{": "}", "(": ")"}
KEYWORDS = {"then", "else", "elif", "do", "!", "time", "exec", "eval", "sudo", "env", *BLOCK_ENDS, *BLOCK_ENDS.values()}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+|[@*])(\[[@*]\])?(?:(:?[-=])(.*))?", re.S)
ARITHMETIC_OPS = {ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod}


class ShellCommand(NamedTuple):
    words: list[str]
    line: int
    variables: dict[str, list[str]]
    """As they were when it would have run."""


def read_commands(text: str, preset: Mapping[str, str], source: str) -> Iterator[ShellCommand]:
    """Every command of a script, expanded. `given` variables are what they are, whatever the script assigns."""
    if len(text) > MAX_CHARS:
        raise UserError(f"{source}: {len(text)} characters; not a launch script")
    variables = {name: [value] for name, value in preset.items()}
    inside: list[str] = []
    for before, statement in _statements(split_words(text.replace(UNKNOWN_MARK, ""), source)):
        while statement and statement[0].raw in KEYWORDS:
            if statement[0].raw in BLOCK_ENDS:
                inside.append(BLOCK_ENDS[statement[0].raw])
            elif inside and inside[-1] == statement[0].raw:
                inside.pop()
            statement = statement[1:]
        if statement and statement[0].raw in ("export", "declare", "local", "readonly", "typeset"):
            statement = [word for word in statement[1:] if not word.raw.startswith("-")]
        rest = _assign(statement, variables, preset, certain=not inside and before not in ("&&", "||"))
        if rest:
            expanded = [each for word in rest for each in _expand_word(word, variables)]
            yield ShellCommand(expanded, rest[0].line, dict(variables))


def _assign(
    statement: list[ShellWord], variables: dict[str, list[str]], given: Mapping[str, str], certain: bool
) -> list[ShellWord]:
    """Make the assignments that a statement begins with; what is left is a command."""
    while statement and (found := ASSIGNMENT.match(statement[0].raw)) and statement[0].segments[0].text[: found.end()]:
        name, more = found[1], found[2]
        first, statement = statement[0], statement[1:]
        if statement and statement[0].is_operator and statement[0].raw == "(":
            end = next((n for n, word in enumerate(statement) if word.is_operator and word.raw == ")"), len(statement))
            value = [
                each for word in statement[1:end] if not word.is_operator for each in _expand_word(word, variables)
            ]
            statement = statement[end + 1 :]
        else:
            value = [" ".join(_expand_word(_drop_prefix(first, found.end()), variables, split=False))]
        if certain and name not in given:
            before = variables.get(name, []) if more else []
            variables[name] = before + value if len(value) != 1 or len(before) > 1 else ["".join([*before, *value])]
            if sum(map(len, variables[name])) + len(variables[name]) > MAX_CHARS:
                raise UserError(f"line {first.line}: {name} grows beyond {MAX_CHARS} characters; not a launch script")
    return statement


def _drop_prefix(word: ShellWord, count: int) -> ShellWord:
    """A word without its first characters."""
    pieces = []
    for piece in word.segments:
        pieces.append(piece._replace(text=piece.text[count:]))
        count = max(count - len(piece.text), 0)
    return word._replace(segments=tuple(pieces))


def _statements(words: Iterator[ShellWord]) -> Iterator[tuple[str, list[ShellWord]]]:
    """Words between operators, and the operator before them. Parentheses after `NAME=` belong to it; what a redirection
    names is left out."""
    out: list[ShellWord] = []
    before = ""
    array = skip = False
    for word in words:
        if array:
            out.append(word)
            array = not (word.is_operator and word.raw == ")")
        elif word.is_operator and word.raw == "(" and out and ASSIGNMENT.fullmatch(out[-1].raw):
            out.append(word)
            array = True
        elif word.is_operator and (word.raw[0] in "<>" or word.raw in ("&>", "&>>")):
            skip = not word.raw[-1].isdigit()
        elif word.is_operator:
            yield before, out
            before, out, skip = word.raw, ([word] if word.raw in "()" else []), False
        elif skip:
            skip = False
        else:
            out.append(word)
    yield before, out


def _expand_word(word: ShellWord, variables: Mapping[str, list[str]], split: bool = True) -> list[str]:
    """The words that a word becomes."""
    out = [""]
    empty = True
    for piece in word.segments:
        values = expand_parameter(piece.text, variables) if piece.expands else [piece.text]
        if piece.expands and piece.splits and split:
            values = [each for value in values for each in re.split(r"[ \t\n]+", value) if each]
        if not values:
            continue
        empty = empty and piece.expands and piece.splits
        out[-1] += values[0]
        out += values[1:]
    return [] if empty and out == [""] and split else out


def expand_parameter(text: str, variables: Mapping[str, list[str]], depth: int = 0) -> list[str]:
    """The value of `$X`, `${...}`, `$((...))`; a command's output is never known."""
    if text.startswith("$(("):
        return [_arithmetic(text[3:-2], variables)]
    inner = text[2:-1] if text.startswith("${") else text[1:] if text.startswith("$") and text[1:2] != "(" else ""
    found = PARAMETER.fullmatch(inner)
    if not found or depth > 20:
        return [_mark_unknown(text)]
    name, every, operator, default = found.groups()
    value = variables.get(name)
    if value is not None and (value != [""] or operator in ("-", "=")):
        return list(value) if every else value[:1] or [""]
    if operator:
        pieces = []
        place = 0
        while place < len(default):
            piece, place = read_segment(default, place, "\\", False, 0, name)
            pieces += expand_parameter(piece.text, variables, depth + 1) if piece.expands else [piece.text]
        return ["".join(pieces).strip("\"'")]
    if value is not None or name in "@*":
        return [] if every or name in "@*" else [""]
    return [_mark_unknown(name)]


def _mark_unknown(text: str) -> str:
    """With spaces that do not split words."""
    return UNKNOWN_MARK + re.sub(r"\s", "\u00a0", text[:40]) + UNKNOWN_MARK


def _arithmetic(text: str, variables: Mapping[str, list[str]]) -> str:
    """Whole numbers and + - * / % between them, divided as bash does."""
    unknown = _mark_unknown(f"$(({text}))")

    def number(found: re.Match[str]) -> str:
        value = "".join(variables.get(found[1], ["?"]))
        return value if re.fullmatch(r"-?\d{1,18}", value) else "?"

    plain = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", number, text).strip()
    if len(plain) > 200 or not re.fullmatch(r"[\d\s()+*/%-]+", plain):
        return unknown

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(int(number)):
                return number
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.BinOp(left, operator, right) if type(operator) in ARITHMETIC_OPS:
                a, b = value(left), value(right)
                if isinstance(operator, ast.Add | ast.Sub | ast.Mult):
                    return a + b if isinstance(operator, ast.Add) else a - b if isinstance(operator, ast.Sub) else a * b
                whole = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
                return a - whole * b if isinstance(operator, ast.Mod) else whole
        raise ValueError

    try:
        return str(value(ast.parse(plain.replace("\n", " "), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return unknown

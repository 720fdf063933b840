"""Reads a shell script without running it: the variables it assigns and the words of its commands.

Supports the subset of bash found in launch scripts: quotes, comments, continued lines, arrays, `$X`, `${X:-default}`,
`$((1 + 2))`. A value that depends on running the script (an unset variable, `$(command)`, `$1`) becomes its name
between two UNKNOWN_MARKs, so that an error can show it if the value is needed; so does a placeholder such as
<Specify path>. Assignments inside for, while, case and functions, and inside an if whose condition is not known, are
skipped, because they may not happen; skipped flags are reported with the commands that follow. A condition is known if
it compares known values with `[`, `[[` or `test`; tests of files, commands and unknown values are not known.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import add, eq, ge, gt, le, lt, mul, ne, sub
from typing import NamedTuple

from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.importers.shell.lexer import ShellWord, read_segment, split_words

UNKNOWN_MARK = "\0"
"""Encloses the name of an unknown value inside a word."""
UNKNOWN = re.compile(f"{UNKNOWN_MARK}[^{UNKNOWN_MARK}]*{UNKNOWN_MARK}")
PLACEHOLDER = re.compile(r"(?<![<\w])<([A-Za-z][^<>\n\0]*[^<>\s\0])>")
"""Text that a script leaves to its reader, such as <Specify path>; to a shell it would be two redirections."""
SPECIAL_CHARACTERS = "<>$`()'\";&|{}#\\"
PROTECTION = str.maketrans(
    SPECIAL_CHARACTERS + " \t\n", "".join(map(chr, range(0xE000, 0xE000 + len(SPECIAL_CHARACTERS)))) + "\u00a0" * 3
)
"""Characters that keep the name of an unknown value one word when it is read again."""
MAX_CHARS = 1_000_000
MAX_DEFAULT_DEPTH = 20
"""Nesting of `${X:-${Y:-...}}`."""
BLOCK_ENDS = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
BLOCK_ENDS |= {"{": "}", "(": ")"}
KEYWORDS = {"then", "else", "elif", "do", "!", "time", "exec", "sudo", "env", *BLOCK_ENDS, *BLOCK_ENDS.values()}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+|[@*])(\[[@*]\])?(?:(:?[-=])(.*))?", re.S)

TEST_COMMANDS = {"[": "]", "[[": "]]", "test": None}
"""Commands that test, and their last word."""
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    f"-{compare.__name__}": compare for compare in (eq, ne, lt, le, gt, ge)
}
GLOB = re.compile(r"[*?\[]")

Variables = dict[str, list[str]]
"""Values by name; arrays have several."""


class ShellCommand(NamedTuple):
    """A command after expansion."""

    words: list[str]
    line: int
    variables: Variables
    """Variables at the time the command would run."""
    skipped_flags: list[str]
    """Assignments of flags before it that may not happen, such as `line 3: ARGS`."""


def read_commands(text: str, preset: Mapping[str, str], source: str) -> Iterator[ShellCommand]:
    """Yield every command of a script, which may hold unknown values. Assignments do not change `preset` variables."""
    if len(text) > MAX_CHARS:
        raise UserError(f"{source}: {counted(len(text), 'character')}; not a launch script")
    text = UNKNOWN.sub(lambda match: match[0].translate(PROTECTION), text)
    text = PLACEHOLDER.sub(lambda match: f"{UNKNOWN_MARK}{match[0].translate(PROTECTION)}{UNKNOWN_MARK}", text)
    variables = {name: [value] for name, value in preset.items()}
    open_blocks: list[OpenBlock] = []
    skipped_flags: list[str] = []
    for operator, statement in _statements(split_words(text, source)):
        negated = False
        while statement and (keyword := statement[0].raw) in KEYWORDS:
            if keyword in BLOCK_ENDS:
                open_blocks.append(OpenBlock(BLOCK_ENDS[keyword], in_condition=keyword == "if"))
                operator = "" if keyword == "if" else operator
            elif open_blocks and open_blocks[-1].end == keyword:
                open_blocks.pop()
            elif open_blocks and open_blocks[-1].end == "fi" and keyword in ("then", "elif", "else"):
                open_blocks[-1].start_branch(keyword)
                operator = ""
            negated = negated or keyword == "!"
            statement = statement[1:]
        if any(block.runs is False for block in open_blocks):
            continue
        if statement and open_blocks and open_blocks[-1].in_condition:
            words = [expanded for word in statement for expanded in _expand_word(word, variables)]
            open_blocks[-1].add_test(operator, None if negated else evaluate_test(words))
        if statement and statement[0].raw in ("export", "declare", "local", "readonly", "typeset"):
            statement = [word for word in statement[1:] if not word.raw.startswith("-")]
        unconditional = all(block.runs for block in open_blocks) and operator not in ("&&", "||")
        assigned = ASSIGNMENT.match(statement[0].raw) if statement and not unconditional else None
        if assigned and any("--" in word.raw for word in statement):
            skipped_flags.append(f"line {statement[0].line}: {assigned[1]}")
        command = _assign(statement, variables, preset, unconditional)
        if command:
            words = [expanded for word in command for expanded in _expand_word(word, variables)]
            yield ShellCommand(words, command[0].line, dict(variables), list(skipped_flags))


def _assign(
    statement: list[ShellWord], variables: Variables, preset: Mapping[str, str], unconditional: bool
) -> list[ShellWord]:
    """Perform the assignments at the start of a statement and return the remaining command."""
    while statement and (match := ASSIGNMENT.match(statement[0].raw)) and statement[0].segments[0].text[: match.end()]:
        name, appends = match[1], match[2]
        first, statement = statement[0], statement[1:]
        if statement and statement[0].is_operator and statement[0].raw == "(":
            closings = (index for index, word in enumerate(statement) if word.is_operator and word.raw == ")")
            end = next(closings, len(statement))
            elements = [word for word in statement[1:end] if not word.is_operator]
            value = [expanded for word in elements for expanded in _expand_word(word, variables)]
            statement = statement[end + 1 :]
        else:
            value = [" ".join(_expand_word(_drop_prefix(first, match.end()), variables, split=False))]
        if unconditional and name not in preset:
            old = variables.get(name, []) if appends else []
            variables[name] = old + value if len(value) != 1 or len(old) > 1 else ["".join([*old, *value])]
            if sum(map(len, variables[name])) + len(variables[name]) > MAX_CHARS:
                raise UserError(f"line {first.line}: {name} exceeds {MAX_CHARS} characters; not a launch script")
    return statement


def _drop_prefix(word: ShellWord, count: int) -> ShellWord:
    """Return a word without its first `count` characters."""
    segments = []
    for segment in word.segments:
        segments.append(segment._replace(text=segment.text[count:]))
        count = max(count - len(segment.text), 0)
    return word._replace(segments=tuple(segments))


def _statements(words: Iterator[ShellWord]) -> Iterator[tuple[str, list[ShellWord]]]:
    """Yield the words between operators, with the operator before them.

    Parentheses after `NAME=` belong to the assignment of an array. Targets of redirections are left out.
    """
    statement: list[ShellWord] = []
    operator = ""
    in_array = skip = False
    for word in words:
        if in_array:
            statement.append(word)
            in_array = not (word.is_operator and word.raw == ")")
        elif word.is_operator and word.raw == "(" and statement and ASSIGNMENT.fullmatch(statement[-1].raw):
            statement.append(word)
            in_array = True
        elif word.is_operator and (word.raw[0] in "<>" or word.raw in ("&>", "&>>")):
            skip = not word.raw[-1].isdigit()
        elif word.is_operator:
            yield operator, statement
            operator, statement, skip = word.raw, ([word] if word.raw in "()" else []), False
        elif skip:
            skip = False
        else:
            statement.append(word)
    yield operator, statement


def _expand_word(word: ShellWord, variables: Mapping[str, list[str]], split: bool = True) -> list[str]:
    """Return the words that a word expands to."""
    words = [""]
    empty = True
    for segment in word.segments:
        values = expand_parameter(segment.text, variables) if segment.expands else [segment.text]
        if segment.expands and segment.splits and split:
            values = [part for value in values for part in re.split(r"[ \t\n]+", value) if part]
        if not values:
            continue
        empty = empty and segment.expands and segment.splits
        words[-1] += values[0]
        words += values[1:]
    return [] if empty and words == [""] and split else words


def expand_parameter(text: str, variables: Mapping[str, list[str]], depth: int = 0) -> list[str]:
    """Return the value of `$X`, `${...}` or `$((...))`; the output of a command is unknown."""
    if text.startswith("$(("):
        return [_arithmetic(text[3:-2], variables)]
    inner = text[2:-1] if text.startswith("${") else text[1:] if text.startswith("$") and text[1:2] != "(" else ""
    match = PARAMETER.fullmatch(inner)
    if not match or depth > MAX_DEFAULT_DEPTH:
        return [_mark_unknown(text)]
    name, all_elements, operator, default = match.groups()
    value = variables.get(name)
    if value is not None and (value != [""] or operator in ("-", "=")):
        return list(value) if all_elements else value[:1] or [""]
    if operator:
        values = []
        pos = 0
        while pos < len(default):
            segment, pos = read_segment(default, pos, "\\", False, 0, name)
            values += expand_parameter(segment.text, variables, depth + 1) if segment.expands else [segment.text]
        return ["".join(values).strip("\"'")]
    if value is not None or name in "@*":
        return [] if all_elements or name in "@*" else [""]
    return [_mark_unknown(name)]


def name_in_script(text: str) -> str:
    """The name of an unknown value as the script has it."""
    return text.translate({new: old for old, new in PROTECTION.items() if chr(old) not in "\t\n"})


def _mark_unknown(text: str) -> str:
    """Mark the name of an unknown value, with non-breaking spaces so that it stays one word."""
    return UNKNOWN_MARK + re.sub(r"\s", "\u00a0", text[:40]) + UNKNOWN_MARK


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: _quotient,
    ast.FloorDiv: _quotient,
    ast.Mod: lambda a, b: a - _quotient(a, b) * b,
}


def _arithmetic(text: str, variables: Mapping[str, list[str]]) -> str:
    """Evaluate an expression of whole numbers with + - * / %; division truncates as in bash."""
    unknown = _mark_unknown(f"$(({text}))")

    def substitute(match: re.Match[str]) -> str:
        value = "".join(variables.get(match[1], ["?"]))
        return value if re.fullmatch(r"-?\d{1,18}", value) else "?"

    expression = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", substitute, text).strip()
    if len(expression) > 200 or not re.fullmatch(r"[\d\s()+*/%-]+", expression):
        return unknown

    def evaluate(node: ast.expr) -> int:
        match node:
            case ast.Constant(int(number)):
                return number
            case ast.UnaryOp(ast.USub(), operand):
                return -evaluate(operand)
            case ast.BinOp(left, operator, right) if type(operator) in ARITHMETIC:
                return ARITHMETIC[type(operator)](evaluate(left), evaluate(right))
        raise ValueError

    try:
        return str(evaluate(ast.parse(expression.replace("\n", " "), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return unknown


def evaluate_test(words: list[str]) -> bool | None:
    """The result of a test command after expansion; None if it is not known."""
    if not words or words[0] not in TEST_COMMANDS or any(UNKNOWN_MARK in word for word in words):
        return None
    closing = TEST_COMMANDS[words[0]]
    match words[1:-1] if closing and words[-1] == closing else words[1:]:
        case ["!", *rest]:
            result = evaluate_test(["test", *rest])
            return None if result is None else not result
        case ["-z", *value] if len(value) < 2:
            return not value or not value[0]  # an unquoted empty value is no word
        case ["-n", value]:
            return bool(value)
        case [a, "=" | "==" | "!=" as comparison, b] if not GLOB.search(b):
            return (a == b) == (comparison != "!=")
        case [a, comparison, b] if comparison in COMPARISONS and re.fullmatch(r"-?\d{1,18} -?\d{1,18}", f"{a} {b}"):
            return COMPARISONS[comparison](int(a), int(b))
    return None


@dataclass
class OpenBlock:
    """A compound command whose end has not been read: if, for, while, case, a function or a group."""

    end: str
    """Keyword that ends it."""
    runs: bool | None = None
    """True or False if its current branch is known to run or not to."""
    in_condition: bool = False
    """The statements are the condition of an if or elif."""
    condition: bool | None = None
    taken: bool | None = False
    """True if an earlier branch runs; None if that is not known."""

    def add_test(self, joined_by: str, result: bool | None) -> None:
        """Add a test to the condition, which && or || joins to the ones before it."""
        if joined_by == "&&":
            both = (self.condition, result)
            self.condition = False if False in both else None if None in both else True
        elif joined_by == "||":
            either = (self.condition, result)
            self.condition = True if True in either else None if None in either else False
        else:
            self.condition = result

    def start_branch(self, keyword: str) -> None:
        """Go on with `then`, `elif` or `else`."""
        if keyword == "elif":
            self.in_condition, self.condition, self.runs = True, None, None
            return
        condition = True if keyword == "else" else self.condition
        self.in_condition = False
        self.runs = False if self.taken or condition is False else None if None in (self.taken, condition) else True
        self.taken = True if self.runs else None if self.runs is None else self.taken

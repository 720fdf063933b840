"""Lexer for shell scripts: splits text into words and operators, without quotes, comments and here-documents.

A word keeps its segments, because `$X` expands differently inside and outside quotes. Nothing is expanded here.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from trainyard.core.errors import UserError

EXPANSION = re.compile(r"\$\(\(|\$\(|\$\{|\$(?=[\w@*#?$!-])|`")
PARAMETER_NAME = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
OPERATOR = re.compile(r"&&|\|\||;;|\|&|&>>|&>|<<<|<<-?|>>|[<>](?:&\d?)?|[;&|()\n]")
HEREDOC_DELIMITER = re.compile(r"[ \t]*[\"']?([\w.-]+)")


class WordSegment(NamedTuple):
    """A quoted, unquoted or expanding segment of a word."""

    text: str
    expands: bool
    splits: bool
    """True outside quotes: spaces in the expanded value separate words."""


class ShellWord(NamedTuple):
    """A word or an operator of a script."""

    segments: tuple[WordSegment, ...]
    line: int
    is_operator: bool = False

    @property
    def raw(self) -> str:
        """The text before expansion, without quotes."""
        return "".join(segment.text for segment in self.segments)


def split_words(text: str, source: str) -> Iterator[ShellWord]:
    """Yield the words and operators of a script. `source` names the script in errors."""
    pos, line, delimiter = 0, 1, ""
    while pos < len(text):
        if text.startswith("\\\n", pos):
            pos, line = pos + 2, line + 1
        elif text[pos] in " \t\r":
            pos += 1
        elif text[pos] == "#":
            end = text.find("\n", pos)
            pos = end if end >= 0 else len(text)
        elif operator := OPERATOR.match(text, pos):
            pos = operator.end()
            yield ShellWord((WordSegment(operator[0], False, False),), line, True)
            if operator[0] in ("<<", "<<-"):
                match = HEREDOC_DELIMITER.match(text, pos)
                delimiter = match[1] if match else ""
            if operator[0] == "\n":
                line += 1
                if delimiter:  # skip the body of a here-document
                    body = re.compile(rf"(.*?\n)??\s*{re.escape(delimiter)}[ \t]*(\n|$)", re.S).match(text, pos)
                    pos, delimiter = body.end() if body else len(text), ""
        else:
            start = pos
            word, pos = _read_word(text, pos, line, source)
            line += text.count("\n", start, pos)
            is_file_descriptor = word.raw.isdigit() and pos < len(text) and text[pos] in "<>"
            if not is_file_descriptor:
                yield word


def _read_word(text: str, pos: int, line: int, source: str) -> tuple[ShellWord, int]:
    """Read one word at `pos` and remove its quotes."""
    segments: list[WordSegment] = []
    while pos < len(text) and not (text[pos] in " \t\r" or OPERATOR.match(text, pos)):
        char = text[pos]
        if text.startswith("\\\n", pos):
            break
        if char == "\\":
            segments.append(WordSegment(text[pos + 1 : pos + 2], False, False))
            pos += 2
        elif char == "'":
            end = text.find("'", pos + 1)
            if end < 0:
                raise UserError(f"{source}:{line}: unclosed quote")
            segments.append(WordSegment(text[pos + 1 : end], False, False))
            pos = end + 1
        elif char == '"':
            pos += 1
            segments.append(WordSegment("", False, False))
            while pos < len(text) and text[pos] != '"':
                segment, pos = read_segment(text, pos, '"\\', False, line, source)
                segments.append(segment)
            if pos >= len(text):
                raise UserError(f"{source}:{line}: unclosed quote")
            pos += 1
        else:
            segment, pos = read_segment(text, pos, "\"'\\ \t\r\n;&|()<>", True, line, source)
            segments.append(segment)
    return ShellWord(tuple(segments), line), pos


def read_segment(text: str, pos: int, ends: str, splits: bool, line: int, source: str) -> tuple[WordSegment, int]:
    """Read an expansion, or plain text up to the next expansion or one of the characters in `ends`."""
    if text[pos] == "\\":
        escaped = text[pos + 1 : pos + 2]
        plain = "" if escaped == "\n" else escaped if escaped in '"\\$`' else "\\" + escaped
        return WordSegment(plain, False, False), pos + 2
    if expansion := EXPANSION.match(text, pos):
        end = _expansion_end(text, pos, expansion[0], line, source)
        return WordSegment(text[pos:end], True, splits), end
    end = pos + 1
    while end < len(text) and text[end] not in ends and not EXPANSION.match(text, end):
        end += 1
    return WordSegment(text[pos:end], False, splits), end


def _expansion_end(text: str, pos: int, opening: str, line: int, source: str) -> int:
    if opening == "$":
        name = PARAMETER_NAME.match(text, pos + 1)
        return name.end() if name else pos + 1
    if opening == "`":
        end = text.find("`", pos + 1) + 1
    else:
        opens, closes, depth = opening[-1], {"(": ")", "{": "}"}[opening[-1]], 0
        end = 0
        for index in range(pos + 1, len(text)):
            depth += (text[index] == opens) - (text[index] == closes)
            if depth == 0:
                end = index + 1
                break
    if not end:
        raise UserError(f"{source}:{line}: unclosed {opening}")
    return end

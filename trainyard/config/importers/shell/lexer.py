"""The words of a shell script: quotes taken off, comments and here-documents left out, operators apart.

A word keeps its pieces, for `$X` means one thing inside quotes and another outside. Nothing is expanded here.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from trainyard.core.errors import UserError

EXPANSION = re.compile(r"\$\(\(|\$\(|\$\{|\$(?=[\w@*#?$!-])|`")
PARAMETER_NAME = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
OPERATOR = re.compile(r"&&|\|\||;;|\|&|&>>|&>|<<<|<<-?|>>|[<>](?:&\d?)?|[;&|()\n]")


class WordSegment(NamedTuple):
    """A stretch of a word, as it stands in the text."""

    text: str
    expands: bool
    splits: bool
    """Spaces in its value make several words (outside quotes)."""


class ShellWord(NamedTuple):
    segments: tuple[WordSegment, ...]
    line: int
    is_operator: bool = False

    @property
    def raw(self) -> str:
        return "".join(piece.text for piece in self.segments)


def split_words(text: str, source: str) -> Iterator[ShellWord]:
    place, line, here = 0, 1, ""
    while place < len(text):
        if text.startswith("\\\n", place):
            place, line = place + 2, line + 1
        elif text[place] in " \t\r":
            place += 1
        elif text[place] == "#":
            end = text.find("\n", place)
            place = end if end >= 0 else len(text)
        elif found := OPERATOR.match(text, place):
            place = found.end()
            yield ShellWord((WordSegment(found[0], False, False),), line, True)
            if found[0] in ("<<", "<<-"):
                ends = re.compile(r"[ \t]*[\"']?([\w.-]+)").match(text, place)
                here = ends[1] if ends else ""
            if found[0] == "\n":
                line += 1
                if here:  # the text of a here-document is no command
                    body = re.compile(rf"(.*?\n)??\s*{re.escape(here)}[ \t]*(\n|$)", re.S).match(text, place)
                    place, here = body.end() if body else len(text), ""
        else:
            start = place
            word, place = _read_word(text, place, line, source)
            line += text.count("\n", start, place)
            number = word.raw.isdigit() and place < len(text) and text[place] in "<>"
            if not number:
                yield word


def _read_word(text: str, place: int, line: int, where: str) -> tuple[ShellWord, int]:
    """One word from `place` on, quotes taken off."""
    pieces: list[WordSegment] = []
    while place < len(text) and not (text[place] in " \t\r" or OPERATOR.match(text, place)):
        each = text[place]
        if text.startswith("\\\n", place):
            break
        if each == "\\":
            pieces.append(WordSegment(text[place + 1 : place + 2], False, False))
            place += 2
        elif each == "'":
            end = text.find("'", place + 1)
            if end < 0:
                raise UserError(f"{where}:{line}: a quote is not closed")
            pieces.append(WordSegment(text[place + 1 : end], False, False))
            place = end + 1
        elif each == '"':
            place += 1
            pieces.append(WordSegment("", False, False))
            while place < len(text) and text[place] != '"':
                piece, place = read_segment(text, place, '"\\', False, line, where)
                pieces.append(piece)
            if place >= len(text):
                raise UserError(f"{where}:{line}: a quote is not closed")
            place += 1
        else:
            piece, place = read_segment(text, place, "\"'\\ \t\r\n;&|()<>", True, line, where)
            pieces.append(piece)
    return ShellWord(tuple(pieces), line), place


def read_segment(text: str, place: int, ends: str, splits: bool, line: int, source: str) -> tuple[WordSegment, int]:
    """An expansion, or plain text up to the next one or to one of `ends`."""
    if text[place] == "\\":
        follows = text[place + 1 : place + 2]
        plain = "" if follows == "\n" else follows if follows in '"\\$`' else "\\" + follows
        return WordSegment(plain, False, False), place + 2
    if found := EXPANSION.match(text, place):
        end = _expansion_end(text, place, found[0], line, source)
        return WordSegment(text[place:end], True, splits), end
    end = place + 1
    while end < len(text) and text[end] not in ends and not EXPANSION.match(text, end):
        end += 1
    return WordSegment(text[place:end], False, splits), end


def _expansion_end(text: str, place: int, opening: str, line: int, where: str) -> int:
    """Where an expansion ends."""
    if opening == "$":
        found = PARAMETER_NAME.match(text, place + 1)
        return found.end() if found else place + 1
    if opening == "`":
        end = text.find("`", place + 1) + 1
    else:
        opens, closes, depth = opening[-1], {"(": ")", "{": "}"}[opening[-1]], 0
        end = 0
        for at in range(place + 1, len(text)):
            depth += (text[at] == opens) - (text[at] == closes)
            if depth == 0:
                end = at + 1
                break
    if not end:
        raise UserError(f"{where}:{line}: {opening} is not closed")
    return end

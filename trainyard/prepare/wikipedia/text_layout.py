"""Second half of wikitext cleaning: lines without links and templates become paragraphs, headings and list items.

A DROPPED_MARK stands where something was dropped. It distinguishes the "( )" that a template leaves behind from the
"()" of a function name.
"""

import html
import re

DROPPED_MARK = "\x01"
"""A character that XML text cannot contain."""
BLANK_CHARACTERS = f" \t\r\xa0{DROPPED_MARK}"
HORIZONTAL_RULE = "----"

QUOTE_RUN = re.compile(r"('{2,})")
ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][\da-fA-F]{1,6}|[A-Za-z][A-Za-z\d]{1,31});")
BEHAVIOR_SWITCH = re.compile(r"__(\w+?)__")
PARENTHESES = re.compile(r"([(（])([^()（）\n]*+)([)）])")
SEPARATOR = re.compile(rf"([;,](?=[\s{DROPPED_MARK}]|$))")
MARK_RUN = re.compile(rf"({DROPPED_MARK}[ {DROPPED_MARK}]*+)")
SPACE_RUN = re.compile(r"  +")
DANGLING_END = re.compile(rf" {DROPPED_MARK}[ {DROPPED_MARK}]*$")
"""Marks after a space. A mark right after a word is what a reference leaves."""
DANGLING_WORDS = {
    "a", "about", "after", "age", "aged", "also", "and", "approximately", "around", "as", "at", "b.", "before",
    "between", "born", "by", "c.", "ca.", "called", "circa", "d.", "died", "est.", "established", "fl.", "flourished",
    "for", "founded", "from", "in", "into", "is", "its", "known", "lit.", "literally", "located", "meaning", "near",
    "of", "on", "or", "over", "pop.", "population", "pronounced", "pronunciation", "r.", "reigned", "since",
    "spelled", "the", "to", "until", "via", "was", "with", "written",
}  # fmt: skip
NO_SPACE_BEFORE = set(",.;:!?)），。\n")


def layout_text(text: str) -> str:
    """Separate paragraphs and headings by one empty line, and put each list item on a line without its markers.

    Headings without text below them are dropped, and so are lines that start with a bar, which belong to a table or
    template whose other end is missing.
    """
    lines: list[str] = []
    headings: list[tuple[int, str]] = []  # level and title of headings without text so far
    gap = False
    if "__" in text:
        text = BEHAVIOR_SWITCH.sub(lambda word: "" if word[1].isupper() else word[0], text)
    for raw in text.split("\n"):
        line = raw.strip(BLANK_CHARACTERS)
        if not line:
            gap = gap or DROPPED_MARK not in raw  # a line whose content was all dropped is not an empty line
            continue
        first = line[0]
        if first == "=" and line[-1] == "=":
            level, title = _parse_heading(line)
            while headings and headings[-1][0] >= level:
                headings.pop()
            headings.append((level, _strip_quotes(title)))
            continue
        if first in "*#:;":
            line = line.lstrip("*#:;" + BLANK_CHARACTERS)
        elif first == "|" or line.startswith("{|"):
            continue
        elif line.startswith(HORIZONTAL_RULE):
            line = line.lstrip("-" + BLANK_CHARACTERS)
            gap = True
        line = _strip_quotes(line)
        if not line or (DROPPED_MARK in line and not any(map(str.isalnum, line))):
            continue
        for _, title in headings:
            lines += ["", title] if title else []
            gap = True
        headings.clear()
        if gap:
            lines.append("")
        lines.append(line)
        gap = False
    return tidy_text("\n".join(lines)).strip()


def decode_entities(text: str) -> str:
    """Entities to characters. An entity ends with a semicolon, as in the wiki; R&D and &copy stay."""
    return ENTITY.sub(lambda entity: html.unescape(entity[0]), text) if "&" in text else text


def tidy_text(text: str) -> str:
    """Decode entities, and close the holes where something was dropped."""
    text = decode_entities(text).replace("\xa0", " ")
    if DROPPED_MARK in text:
        text = _remove_marks(PARENTHESES.sub(_clean_parentheses, text))
    return SPACE_RUN.sub(" ", text)


def _parse_heading(line: str) -> tuple[int, str]:
    """Level and title: `=== Words ===` has level 3."""
    inner = line.strip("=")
    left = line.index(inner) if inner else 0
    level = max(1, min(left, len(line) - left - len(inner), 6))
    return level, line[level:-level].strip(BLANK_CHARACTERS) if inner else ""


def _strip_quotes(line: str) -> str:
    """Remove the quotes of italics and bold.

    If both stay open, one ''' is an apostrophe before italics (L'''Iliade''): the first after a one-letter word, or
    after any word, or any. MediaWiki has the same rule.
    """
    if "''" not in line:
        return line
    parts = QUOTE_RUN.split(line)
    lengths = [min(len(run), 5) - (len(run) == 4) for run in parts[1::2]]
    apostrophe = -1
    if sum(n != 3 for n in lengths) % 2 and sum(n != 2 for n in lengths) % 2:
        bold = [index for index, n in enumerate(lengths) if n == 3]
        before = [parts[2 * index] for index in bold]
        ranks = [2 if text[-1:] in ("", " ") else int(text[-2:-1] not in ("", " ")) for text in before]
        if bold:
            apostrophe = 2 * bold[ranks.index(min(ranks))] + 1
    for index in range(1, len(parts), 2):
        parts[index] = "'" * (len(parts[index]) - lengths[index // 2] + (index == apostrophe))
    return "".join(parts)


def _clean_parentheses(match: re.Match[str]) -> str:
    """(French: MARK; born 1900) becomes (born 1900), and (MARK) disappears."""
    if DROPPED_MARK not in match[2]:
        return match[0]
    text, separator = "", ""
    parts = SEPARATOR.split(match[2])
    for index in range(0, len(parts), 2):
        part = _drop_dangling_words(parts[index].strip())
        if part and not (DROPPED_MARK in parts[index] and part[-1] == ":"):
            text += (f"{separator} " if text else "") + part
            separator = ""
        if index + 1 < len(parts):
            separator = separator or parts[index + 1]
    return match[1] + text + match[3] if text else DROPPED_MARK


def _drop_dangling_words(part: str) -> str:
    """Remove the marks, and the words that lead to what was dropped at the end: `born MARK`, `pronounced as MARK`."""
    text = part.replace(DROPPED_MARK, "").strip()
    if DANGLING_END.search(part):
        words = text.split(" ")
        while words and words[-1].lower().rstrip(":") in DANGLING_WORDS:
            words.pop()
        text = " ".join(words)
    return text


def _remove_marks(text: str) -> str:
    """Leave no space before punctuation, and one space where there were two."""
    parts = MARK_RUN.split(text)
    for index in range(1, len(parts), 2):
        after = parts[index + 1][:1]
        if after in NO_SPACE_BEFORE:
            parts[index - 1] = parts[index - 1].rstrip(" ")
            parts[index] = ""
        else:
            parts[index] = " " if " " in parts[index] else ""
    return "".join(parts)

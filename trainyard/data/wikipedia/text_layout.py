"""The second half of cleaning: lines of text without links and templates become paragraphs, headings and list items.

Where something was dropped there is a MARK. It tells "( )" that a template has left from the "()" of a function's name.
"""

import html
import re

DROPPED_MARK = "\x01"
"""No XML text can have it."""
BLANK_CHARACTERS = f" \t\r\xa0{DROPPED_MARK}"
HORIZONTAL_RULE = "----"

QUOTE_RUN = re.compile(r"('{2,})")
ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][\da-fA-F]{1,6}|[A-Za-z][A-Za-z\d]{1,31});")
BEHAVIOR_SWITCH = re.compile(r"__(\w+?)__")
PARENTHESES = re.compile(r"([(（])([^()（）\n]*+)([)）])")
SEPARATOR = re.compile(rf"([;,](?=[\s{DROPPED_MARK}]|$))")
MARK_RUN = re.compile(rf"({DROPPED_MARK}[ {DROPPED_MARK}]*+)")
SPACE_RUN = re.compile(r"  +")
NO_SPACE_BEFORE = set(",.;:!?)），。\n")


def layout_text(text: str) -> str:
    """Paragraphs are one empty line apart, and so are headings; an item of a list is a line, without its marks.

    A heading with nothing under it goes. So do lines that begin with a bar, which belong to a table or template whose
    other end is missing.
    """
    out: list[str] = []
    headings: list[tuple[int, str]] = []  # level and words, of those that have no text yet
    gap = False
    if "__" in text:
        text = BEHAVIOR_SWITCH.sub(lambda word: "" if word[1].isupper() else word[0], text)
    for raw in text.split("\n"):
        line = raw.strip(BLANK_CHARACTERS)
        if not line:
            gap = gap or DROPPED_MARK not in raw  # a line on which all was dropped is not a line
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
            out += ["", title] if title else []
            gap = True
        headings.clear()
        if gap:
            out.append("")
        out.append(line)
        gap = False
    return tidy_text("\n".join(out)).strip()


def decode_entities(text: str) -> str:
    """Entities as characters. Only what ends with a semicolon is one, as in the wiki: R&D, &copy."""
    return ENTITY.sub(lambda entity: html.unescape(entity[0]), text) if "&" in text else text


def tidy_text(text: str) -> str:
    """Entities as characters, and no holes where something was dropped."""
    text = decode_entities(text).replace("\xa0", " ")
    if DROPPED_MARK in text:
        text = _remove_marks(PARENTHESES.sub(_clean_parentheses, text))
    return SPACE_RUN.sub(" ", text)


def _parse_heading(line: str) -> tuple[int, str]:
    """`=== Words ===` is of level 3."""
    inner = line.strip("=")
    left = line.index(inner) if inner else 0
    level = max(1, min(left, len(line) - left - len(inner), 6))
    return level, line[level:-level].strip(BLANK_CHARACTERS) if inner else ""


def _strip_quotes(line: str) -> str:
    """Without the quotes of italics and bold.

    If both stay open, one ''' was an apostrophe before italics (L'''Iliade''): the first after a word of one letter,
    or after any word, or any. That is the wiki's own rule.
    """
    if "''" not in line:
        return line
    parts = QUOTE_RUN.split(line)
    lengths = [min(len(run), 5) - (len(run) == 4) for run in parts[1::2]]
    apostrophe = -1
    if sum(n != 3 for n in lengths) % 2 and sum(n != 2 for n in lengths) % 2:
        before = [parts[2 * index] for index, n in enumerate(lengths) if n == 3]
        places = [2 * index + 1 for index, n in enumerate(lengths) if n == 3]
        ranks = [2 if text[-1:] in ("", " ") else int(text[-2:-1] not in ("", " ")) for text in before]
        if places:
            apostrophe = places[ranks.index(min(ranks))]
    for place in range(1, len(parts), 2):
        parts[place] = "'" * (len(parts[place]) - lengths[place // 2] + (place == apostrophe))
    return "".join(parts)


def _clean_parentheses(match: re.Match[str]) -> str:
    """(French: MARK; born 1900) becomes (born 1900), and (MARK) nothing."""
    if DROPPED_MARK not in match[2]:
        return match[0]
    kept, separator = "", ""
    parts = SEPARATOR.split(match[2])
    for index in range(0, len(parts), 2):
        part = parts[index].replace(DROPPED_MARK, "").strip()
        if part and not (DROPPED_MARK in parts[index] and part[-1] == ":"):
            kept += (f"{separator} " if kept else "") + part
            separator = ""
        if index + 1 < len(parts):
            separator = separator or parts[index + 1]
    return match[1] + kept + match[3] if kept else DROPPED_MARK


def _remove_marks(text: str) -> str:
    """No space before a comma, and one where there were two."""
    parts = MARK_RUN.split(text)
    for index in range(1, len(parts), 2):
        after = parts[index + 1][:1]
        if after in NO_SPACE_BEFORE:
            parts[index - 1] = parts[index - 1].rstrip(" ")
            parts[index] = ""
        else:
            parts[index] = " " if " " in parts[index] else ""
    return "".join(parts)

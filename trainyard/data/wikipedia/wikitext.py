"""Wikitext to the plain text that one would train on.

One pass over the tokens of the markup, in time linear in the text whatever it is: pieces of text go to a list, what is
open (a template, a link, a table) is a stack of places in that list, and what closes replaces its pieces by what one
reads of it. What never closes has left its pieces as they were: it is text, as the wiki itself would show it, and no
missing brace loses the rest of an article.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from trainyard.data.wikipedia.templates import show
from trainyard.data.wikipedia.text_layout import MARK, arrange, decode

TOKEN = re.compile(
    r"""\[\[(?:([^\[\]{}|<>\n:]++)(?:\|([^\[\]{}|<>\n]++))?\]\])?"""  # a plain link, whole, or where another begins
    r"""|\[(?:https?:|ftp:)?//[^\s\[\]{}|<>"]*+"""  # a link out of the wiki
    r"""|\]\]*+"""
    r"""|\{\{(?:([^\[\]{}|<>]++)(\|[^\[\]{}<>]*+)?\}\}(?!\})|\{*+)"""  # a plain template, whole, or open braces
    r"""|\{\|"""
    r"""|\}\}++"""
    r"""|\|(?:\}(?!\}(?!\})))?"""  # |} ends a table, but the bar of |}} is an empty argument
    r"""|<!--|<(/?)([A-Za-z][A-Za-z\d]*+)((?:[\s/][^<>]*+)?)>"""
)
"""Groups: target and label of a link; name and arguments of a template; slash, name and rest of a tag."""
# Each alternative begins with one plain character: the search for the next token is then a scan for a few characters.
LINK, EXTERNAL, BRACES, TABLE, MARKUP_TABLE = "[[", "[", "{{", "{|", "<table"
DEPTH = 50
"""Within so many levels of nesting, whatever closes is dropped unread: reading costs its length at each level."""

DROPPED = {
    "ref", "references", "math", "chem", "ce", "gallery", "timeline", "syntaxhighlight", "source", "score", "hiero",
    "imagemap", "graph", "mapframe", "maplink", "templatedata", "templatestyles", "inputbox", "categorytree",
    "includeonly", "indicator", "style", "script",
}  # fmt: skip
"""Tags that go with all they hold."""
LITERAL = {"nowiki", "pre"}
"""Tags that hold no markup, only text."""
BREAKS = {
    "br", "p", "div", "li", "ul", "ol", "dl", "dt", "dd", "blockquote", "center", "h1", "h2", "h3", "h4", "h5", "h6",
    "hr", "poem", "tr", "td", "th", "caption", "section",
}  # fmt: skip
"""Tags that end a line."""
POWER = re.compile(r"\s*([-−+]?\d+)\s*</sup\s*>", re.IGNORECASE)
RAISED = str.maketrans("0123456789-−+", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁻⁺")
PROTECTED = {ord(character): f"&#{ord(character)};" for character in "&'[]{}|<>=*#:;_-!"}
"""Characters of markup as entities, which become characters again when all markup is gone."""
TAG = {name: re.compile(rf"<(/?){name}(?:[\s/][^<>]*+)?>", re.IGNORECASE) for name in DROPPED | LITERAL}
LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]+)*|simple")
NO_LANGUAGES = {"doi", "rfc", "pmc"}


HIDDEN = {
    "file", "image", "category", "bild", "datei", "kategorie", "fichier", "imagem", "ficheiro", "imagen", "archivo",
    "immagine", "afbeelding", "bestand", "grafika", "plik", "fil", "изображение", "файл", "画像", "ファイル", "文件",
    "图像", "圖像", "檔案",
}  # fmt: skip
"""In every wiki; and names of old that a dump's list of namespaces leaves out."""


@dataclass(frozen=True)
class Names:
    """Namespaces whose links are no text, in lower case, as this wiki calls them."""

    hidden: frozenset[str] = frozenset()

    def hide(self, target: str) -> bool:
        """Whether a link shows nothing where it stands: a picture, a category, the page in another language."""
        prefix, colon, _ = target.partition(":")
        if not colon:
            return False
        name = prefix.strip().replace("_", " ").lower()
        return (
            name in HIDDEN
            or name in self.hidden
            or (LANGUAGE.fullmatch(prefix) is not None and prefix not in NO_LANGUAGES)
        )


ANY_WIKI = Names()


class Open(NamedTuple):
    kind: str
    begin: int
    """Its piece of the output: the opening token; what it holds follows."""
    bars: list[int]
    """Pieces that separate its arguments."""


def clean(text: str, names: Names = ANY_WIKI) -> str:
    """Plain text of a page: paragraphs, headings and items of lists."""
    return arrange(Reader(text.replace(MARK, ""), names).read())


class Reader:
    """One pass over a text."""

    def __init__(self, text: str, names: Names) -> None:
        self.text, self.names = text, names
        self.out: list[str] = []
        self.stack: list[Open] = []
        self.opened = dict.fromkeys((LINK, EXTERNAL, BRACES, TABLE, MARKUP_TABLE), 0)
        """How many of each kind are on the stack."""
        self.comments = True
        """Whether a comment may still have an end."""

    def read(self) -> str:
        text, out, stack, position = self.text, self.out, self.stack, 0  # all before position has been read
        for match in TOKEN.finditer(text):
            start, end = match.span()
            if start < position:
                continue
            if start > position:
                out.append(text[position:start])
            position = end
            token = match[0]
            first = token[0]
            if first == "|":
                if token == "|}" and self.opened[TABLE] and self.begins_line(start, " \t"):
                    self.drop(self.close(TABLE))
                    continue
                if stack and stack[-1].kind in (BRACES, LINK):
                    stack[-1].bars.append(len(out))
                out.append(token)
            elif first == "[":
                self.bracket(token, match[1], match[2])
            elif first == "]":
                self.end_bracket(len(token))
            elif first == "<":
                position = self.tag(match) if match[6] else self.comment(start)
            elif first == "}":
                self.end_braces(len(token))
            elif match[3]:
                out.append(show(match[3], (match[4] or "").split("|")[1:]) or MARK)
            elif token == "{|":
                if self.begins_line(start, " \t:*#;"):
                    self.open(TABLE, token)
                else:
                    out.append(token)
            else:
                for _ in range(len(token) // 2 - 1):
                    self.open(BRACES, "{{")
                self.open(BRACES, "{{{" if len(token) % 2 else "{{")
        out.append(text[position:])
        return "".join(out)

    def begins_line(self, start: int, allowed: str) -> bool:
        before = self.text[max(start - 20, 0) : start].rstrip(allowed)
        return before.endswith("\n") or (not before and start <= 20)

    def open(self, kind: str, token: str) -> None:
        self.stack.append(Open(kind, len(self.out), []))
        self.opened[kind] += 1
        self.out.append(token)

    def close(self, kind: str) -> Open:
        """The innermost open thing of a kind, no longer open. What is open within it never closed, and stays text."""
        while True:
            found = self.stack.pop()
            self.opened[found.kind] -= 1
            if found.kind == kind:
                return found

    def drop(self, found: Open) -> None:
        del self.out[found.begin :]
        self.out.append(MARK)

    def parts(self, found: Open) -> list[str]:
        """What stands between the bars of something that closes here."""
        return ["".join(self.out[a + 1 : b]) for a, b in pairwise((found.begin, *found.bars, len(self.out)))]

    def bracket(self, token: str, target: str | None, label: str | None) -> None:
        if token[1:2] != "[":
            self.open(EXTERNAL, token)
            return
        if self.stack and self.stack[-1].kind == LINK and not self.stack[-1].bars:
            self.close(LINK)  # there is no link in the target of a link
        if target is None:
            self.open(LINK, token)
        else:
            self.out.append(label or target)

    def end_bracket(self, count: int) -> None:
        """So many at once: links out of the wiki take one each, and are the innermost where the rest comes in pairs."""
        above = self.external(count)
        while count:
            if count >= 2 and self.opened[LINK] and not (above and (count - above) % 2 == 0):
                self.link(self.close(LINK))
                count -= 2
                above = self.external(count)
            elif above:
                found = self.close(EXTERNAL)
                self.out[found.begin] = ""
                count, above = count - 1, above - 1
            else:
                self.out.append("]" * count)
                return

    def external(self, most: int) -> int:
        """How many links out of the wiki are the innermost open things, up to `most`."""
        count = 0
        while count < min(most, len(self.stack)) and self.stack[-1 - count].kind == EXTERNAL:
            count += 1
        return count

    def link(self, found: Open) -> None:
        if len(self.stack) >= DEPTH:
            self.drop(found)
            return
        target, *labels = self.parts(found)
        if not target.strip() or "\n" in target:
            self.out.append("]]")
            return
        del self.out[found.begin :]
        if target.lstrip()[0] == ":":
            self.out.append("|".join(labels) or target.replace(":", "", 1))
        elif not self.names.hide(target.strip()):
            self.out.append("|".join(labels) or target)

    def end_braces(self, count: int) -> None:
        while count >= 2 and self.opened[BRACES]:
            found = self.close(BRACES)
            count -= min(len(self.out[found.begin]), count)
            self.template(found)
        self.out.append("}" * count)

    def template(self, found: Open) -> None:
        shown = ""
        if len(self.stack) < DEPTH:
            name, *arguments = self.parts(found)
            shown = show(name, arguments)
        self.drop(found)
        if shown:
            self.out[-1] = shown

    def comment(self, start: int) -> int:
        """Where to read on."""
        end = self.text.find("-->", start) if self.comments else -1
        if end < 0:
            self.comments = False
            self.out.append("<!--")
            return start + 4
        # A line with nothing but a comment is no line.
        alone = self.text[start - 1 : start] == "\n" == self.text[end + 3 : end + 4]
        return end + 3 + alone

    def tag(self, match: re.Match[str]) -> int:
        """Where to read on."""
        closing, name, rest, end = match[5], match[6].lower(), match[7], match.end()
        if name in DROPPED or name in LITERAL:
            if not closing and not rest.endswith("/"):
                return self.whole(name, end)
        elif name == "table":
            if not closing:
                self.open(MARKUP_TABLE, "")
            elif self.opened[MARKUP_TABLE]:
                self.drop(self.close(MARKUP_TABLE))
        elif name in BREAKS:
            self.out.append("\n")
        elif name == "sup" and not closing and (power := POWER.match(self.text, end)):
            self.out.append(power[1].translate(RAISED))  # 10<sup>6</sup> is not 106
            return power.end()
        elif "=" not in rest and rest.strip(" /"):
            self.out.append(match[0])  # no tag: a<b and b>c
        return end

    def whole(self, name: str, start: int) -> int:
        """A tag with what it holds, dropped or as text. If the same tag begins anew before it ends, it has no end."""
        for match in TAG[name].finditer(self.text, start):
            if match[1]:
                held = self.text[start : match.start()]
                self.out.append(decode(held).translate(PROTECTED) if name in LITERAL else MARK)
                return match.end()
            if not match[0].endswith("/>"):
                break
        return start

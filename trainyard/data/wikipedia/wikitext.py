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

from trainyard.data.wikipedia.templates import expand_template
from trainyard.data.wikipedia.text_layout import DROPPED_MARK, decode_entities, layout_text

MARKUP_TOKEN = re.compile(
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
LINK, EXTERNAL_LINK, TEMPLATE, TABLE, HTML_TABLE = "[[", "[", "{{", "{|", "<table"
MAX_DEPTH = 50
"""Within so many levels of nesting, whatever closes is dropped unread: reading costs its length at each level."""

DROPPED_TAGS = {
    "ref", "references", "math", "chem", "ce", "gallery", "timeline", "syntaxhighlight", "source", "score", "hiero",
    "imagemap", "graph", "mapframe", "maplink", "templatedata", "templatestyles", "inputbox", "categorytree",
    "includeonly", "indicator", "style", "script",
}  # fmt: skip
"""Tags that go with all they hold."""
LITERAL_TAGS = {"nowiki", "pre"}
"""Tags that hold no markup, only text."""
LINE_BREAK_TAGS = {
    "br", "p", "div", "li", "ul", "ol", "dl", "dt", "dd", "blockquote", "center", "h1", "h2", "h3", "h4", "h5", "h6",
    "hr", "poem", "tr", "td", "th", "caption", "section",
}  # fmt: skip
"""Tags that end a line."""
SUPERSCRIPT_NUMBER = re.compile(r"\s*([-−+]?\d+)\s*</sup\s*>", re.IGNORECASE)
SUPERSCRIPT_CHARACTERS = str.maketrans("0123456789-−+", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁻⁺")
MARKUP_ENTITIES = {ord(character): f"&#{ord(character)};" for character in "&'[]{}|<>=*#:;_-!"}
"""Characters of markup as entities, which become characters again when all markup is gone."""
TAG_PATTERNS = {
    name: re.compile(rf"<(/?){name}(?:[\s/][^<>]*+)?>", re.IGNORECASE) for name in DROPPED_TAGS | LITERAL_TAGS
}
LANGUAGE_PREFIX = re.compile(r"[a-z]{2,3}(?:-[a-z]+)*|simple")
NON_LANGUAGE_PREFIXES = {"doi", "rfc", "pmc"}


HIDDEN_NAMESPACES = {
    "file", "image", "category", "bild", "datei", "kategorie", "fichier", "imagem", "ficheiro", "imagen", "archivo",
    "immagine", "afbeelding", "bestand", "grafika", "plik", "fil", "изображение", "файл", "画像", "ファイル", "文件",
    "图像", "圖像", "檔案",
}  # fmt: skip
"""In every wiki; and names of old that a dump's list of namespaces leaves out."""


@dataclass(frozen=True)
class WikiNamespaces:
    """Namespaces whose links are no text, in lower case, as this wiki calls them."""

    hidden: frozenset[str] = frozenset()

    def hides_link(self, target: str) -> bool:
        """Whether a link shows nothing where it stands: a picture, a category, the page in another language."""
        prefix, colon, _ = target.partition(":")
        if not colon:
            return False
        name = prefix.strip().replace("_", " ").lower()
        return (
            name in HIDDEN_NAMESPACES
            or name in self.hidden
            or (LANGUAGE_PREFIX.fullmatch(prefix) is not None and prefix not in NON_LANGUAGE_PREFIXES)
        )


DEFAULT_NAMESPACES = WikiNamespaces()


class OpenElement(NamedTuple):
    kind: str
    output_index: int
    """Its piece of the output: the opening token; what it holds follows."""
    separators: list[int]
    """Pieces that separate its arguments."""


def wikitext_to_text(text: str, namespaces: WikiNamespaces = DEFAULT_NAMESPACES) -> str:
    """Plain text of a page: paragraphs, headings and items of lists."""
    return layout_text(WikitextParser(text.replace(DROPPED_MARK, ""), namespaces).parse())


class WikitextParser:
    """One pass over a text."""

    def __init__(self, text: str, namespaces: WikiNamespaces) -> None:
        self.text, self.namespaces = text, namespaces
        self.output: list[str] = []
        self.stack: list[OpenElement] = []
        self.open_counts = dict.fromkeys((LINK, EXTERNAL_LINK, TEMPLATE, TABLE, HTML_TABLE), 0)
        """How many of each kind are on the stack."""
        self.comment_may_close = True
        """Whether a comment may still have an end."""

    def parse(self) -> str:
        text, out, stack, position = self.text, self.output, self.stack, 0  # all before position has been read
        for match in MARKUP_TOKEN.finditer(text):
            start, end = match.span()
            if start < position:
                continue
            if start > position:
                out.append(text[position:start])
            position = end
            token = match[0]
            first = token[0]
            if first == "|":
                if token == "|}" and self.open_counts[TABLE] and self.begins_line(start, " \t"):
                    self.drop_element(self.close_element(TABLE))
                    continue
                if stack and stack[-1].kind in (TEMPLATE, LINK):
                    stack[-1].separators.append(len(out))
                out.append(token)
            elif first == "[":
                self.on_open_bracket(token, match[1], match[2])
            elif first == "]":
                self.on_close_brackets(len(token))
            elif first == "<":
                position = self.on_tag(match) if match[6] else self.skip_comment(start)
            elif first == "}":
                self.on_close_braces(len(token))
            elif match[3]:
                out.append(expand_template(match[3], (match[4] or "").split("|")[1:]) or DROPPED_MARK)
            elif token == "{|":
                if self.begins_line(start, " \t:*#;"):
                    self.open_element(TABLE, token)
                else:
                    out.append(token)
            else:
                for _ in range(len(token) // 2 - 1):
                    self.open_element(TEMPLATE, "{{")
                self.open_element(TEMPLATE, "{{{" if len(token) % 2 else "{{")
        out.append(text[position:])
        return "".join(out)

    def begins_line(self, start: int, allowed: str) -> bool:
        before = self.text[max(start - 20, 0) : start].rstrip(allowed)
        return before.endswith("\n") or (not before and start <= 20)

    def open_element(self, kind: str, token: str) -> None:
        self.stack.append(OpenElement(kind, len(self.output), []))
        self.open_counts[kind] += 1
        self.output.append(token)

    def close_element(self, kind: str) -> OpenElement:
        """The innermost open thing of a kind, no longer open. What is open within it never closed, and stays text."""
        while True:
            found = self.stack.pop()
            self.open_counts[found.kind] -= 1
            if found.kind == kind:
                return found

    def drop_element(self, found: OpenElement) -> None:
        del self.output[found.output_index :]
        self.output.append(DROPPED_MARK)

    def element_arguments(self, found: OpenElement) -> list[str]:
        """What stands between the bars of something that closes here."""
        return [
            "".join(self.output[a + 1 : b])
            for a, b in pairwise((found.output_index, *found.separators, len(self.output)))
        ]

    def on_open_bracket(self, token: str, target: str | None, label: str | None) -> None:
        if token[1:2] != "[":
            self.open_element(EXTERNAL_LINK, token)
            return
        if self.stack and self.stack[-1].kind == LINK and not self.stack[-1].separators:
            self.close_element(LINK)  # there is no link in the target of a link
        if target is None:
            self.open_element(LINK, token)
        else:
            self.output.append(label or target)

    def on_close_brackets(self, count: int) -> None:
        """So many at once: links out of the wiki take one each, and are the innermost where the rest comes in pairs."""
        above = self.innermost_external_links(count)
        while count:
            if count >= 2 and self.open_counts[LINK] and not (above and (count - above) % 2 == 0):
                self.close_link(self.close_element(LINK))
                count -= 2
                above = self.innermost_external_links(count)
            elif above:
                found = self.close_element(EXTERNAL_LINK)
                self.output[found.output_index] = ""
                count, above = count - 1, above - 1
            else:
                self.output.append("]" * count)
                return

    def innermost_external_links(self, most: int) -> int:
        """How many links out of the wiki are the innermost open things, up to `most`."""
        count = 0
        while count < min(most, len(self.stack)) and self.stack[-1 - count].kind == EXTERNAL_LINK:
            count += 1
        return count

    def close_link(self, found: OpenElement) -> None:
        if len(self.stack) >= MAX_DEPTH:
            self.drop_element(found)
            return
        target, *labels = self.element_arguments(found)
        if not target.strip() or "\n" in target:
            self.output.append("]]")
            return
        del self.output[found.output_index :]
        if target.lstrip()[0] == ":":
            self.output.append("|".join(labels) or target.replace(":", "", 1))
        elif not self.namespaces.hides_link(target.strip()):
            self.output.append("|".join(labels) or target)

    def on_close_braces(self, count: int) -> None:
        while count >= 2 and self.open_counts[TEMPLATE]:
            found = self.close_element(TEMPLATE)
            count -= min(len(self.output[found.output_index]), count)
            self.close_template(found)
        self.output.append("}" * count)

    def close_template(self, found: OpenElement) -> None:
        shown = ""
        if len(self.stack) < MAX_DEPTH:
            name, *arguments = self.element_arguments(found)
            shown = expand_template(name, arguments)
        self.drop_element(found)
        if shown:
            self.output[-1] = shown

    def skip_comment(self, start: int) -> int:
        """Where to read on."""
        end = self.text.find("-->", start) if self.comment_may_close else -1
        if end < 0:
            self.comment_may_close = False
            self.output.append("<!--")
            return start + 4
        # A line with nothing but a comment is no line.
        alone = self.text[start - 1 : start] == "\n" == self.text[end + 3 : end + 4]
        return end + 3 + alone

    def on_tag(self, match: re.Match[str]) -> int:
        """Where to read on."""
        closing, name, rest, end = match[5], match[6].lower(), match[7], match.end()
        if name in DROPPED_TAGS or name in LITERAL_TAGS:
            if not closing and not rest.endswith("/"):
                return self.skip_or_copy_element(name, end)
        elif name == "table":
            if not closing:
                self.open_element(HTML_TABLE, "")
            elif self.open_counts[HTML_TABLE]:
                self.drop_element(self.close_element(HTML_TABLE))
        elif name in LINE_BREAK_TAGS:
            self.output.append("\n")
        elif name == "sup" and not closing and (power := SUPERSCRIPT_NUMBER.match(self.text, end)):
            self.output.append(power[1].translate(SUPERSCRIPT_CHARACTERS))  # 10<sup>6</sup> is not 106
            return power.end()
        elif "=" not in rest and rest.strip(" /"):
            self.output.append(match[0])  # no tag: a<b and b>c
        return end

    def skip_or_copy_element(self, name: str, start: int) -> int:
        """A tag with what it holds, dropped or as text. If the same tag begins anew before it ends, it has no end."""
        for match in TAG_PATTERNS[name].finditer(self.text, start):
            if match[1]:
                held = self.text[start : match.start()]
                self.output.append(
                    decode_entities(held).translate(MARKUP_ENTITIES) if name in LITERAL_TAGS else DROPPED_MARK
                )
                return match.end()
            if not match[0].endswith("/>"):
                break
        return start

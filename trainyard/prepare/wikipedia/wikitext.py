"""Wikitext to plain text for training.

One pass over the markup tokens, in time linear in the text: text goes to an output list, a stack holds the open
elements (templates, links, tables) as indices into that list, and closing an element replaces its part of the list by
its readable text. An element that never closes leaves its part unchanged: it stays text, as the wiki itself shows it,
and no missing brace loses the rest of an article.
"""

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from trainyard.prepare.wikipedia.templates import expand_template, superscript
from trainyard.prepare.wikipedia.text_layout import DROPPED_MARK, decode_entities, layout_text

MARKUP_TOKEN = re.compile(
    r"""\[\[(?:([^\[\]{}|<>\n:]++)(?:\|([^\[\]{}|<>\n]++))?\]\])?"""  # a complete plain link, or the start of another
    r"""|\[(?:https?:|ftp:)?//[^\s\[\]{}|<>"]*+"""  # an external link
    r"""|\]\]*+"""
    r"""|\{\{(?:([^\[\]{}|<>]++)(\|[^\[\]{}<>]*+)?\}\}(?!\})|\{*+)"""  # a complete plain template, or open braces
    r"""|\{\|"""
    r"""|\}\}++"""
    r"""|\|(?:\}(?!\}(?!\})))?"""  # |} ends a table, but the bar of |}} is an empty argument
    r"""|<!--|<(/?)([A-Za-z][A-Za-z\d]*+)((?:[\s/][^<>]*+)?)>"""
)
"""Groups: target and label of a link; name and arguments of a template; slash, name and rest of a tag."""
# Each alternative starts with a literal character, so the search for the next token is a scan for a few characters.
LINK, EXTERNAL_LINK, TEMPLATE, TABLE, HTML_TABLE = "[[", "[", "{{", "{|", "<table"
MAX_DEPTH = 50
"""An element inside this many levels is dropped when it closes: expanding it costs its length at each level."""

DROPPED_TAGS = {
    "ref", "references", "math", "chem", "ce", "gallery", "timeline", "syntaxhighlight", "source", "score", "hiero",
    "imagemap", "graph", "mapframe", "maplink", "templatedata", "templatestyles", "inputbox", "categorytree",
    "includeonly", "indicator", "style", "script",
}  # fmt: skip
"""Tags that are dropped with their content."""
LITERAL_TAGS = {"nowiki", "pre"}
"""Tags whose content is text without markup."""
LINE_BREAK_TAGS = {
    "br", "p", "div", "li", "ul", "ol", "dl", "dt", "dd", "blockquote", "center", "h1", "h2", "h3", "h4", "h5", "h6",
    "hr", "poem", "tr", "td", "th", "caption", "section",
}  # fmt: skip
SUPERSCRIPT_NUMBER = re.compile(r"\s*([-−+]?\d+)\s*</sup\s*>", re.IGNORECASE)
MARKUP_ENTITIES = {ord(character): f"&#{ord(character)};" for character in "&'[]{}|<>=*#:;_-!"}
"""Markup characters of literal text as entities, which become characters again when all markup is gone."""
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
"""Names of files and categories in every wiki, and old names that the namespace list of a dump omits."""


class OpenElement(NamedTuple):
    kind: str
    output_index: int
    """Index in the output of the opening token; the content follows."""
    separators: list[int]
    """Indices in the output of the bars between the arguments."""


def wikitext_to_text(
    text: str, hidden_namespaces: frozenset[str] = frozenset(), variables: Mapping[str, str] | None = None
) -> str:
    """Plain text of a page: paragraphs, headings and list items. `variables` are those of MediaWiki, in lowercase."""
    return layout_text(WikitextParser(text.replace(DROPPED_MARK, ""), hidden_namespaces, variables or {}).parse())


class WikitextParser:
    """One pass over the wikitext of a page."""

    def __init__(self, text: str, hidden_namespaces: frozenset[str], variables: Mapping[str, str]) -> None:
        self.variables = variables
        self.text, self.hidden_namespaces = text, HIDDEN_NAMESPACES | hidden_namespaces
        self.output: list[str] = []
        self.stack: list[OpenElement] = []
        self.open_counts = dict.fromkeys((LINK, EXTERNAL_LINK, TEMPLATE, TABLE, HTML_TABLE), 0)
        """Elements of each kind on the stack."""
        self.comment_may_close = True
        """False after a comment without an end, so that the text is not searched for an end again."""

    def parse(self) -> str:
        text, output, stack, position = self.text, self.output, self.stack, 0
        for match in MARKUP_TOKEN.finditer(text):
            start, end = match.span()
            if start < position:
                continue
            if start > position:
                output.append(text[position:start])
            position = end
            token = match[0]
            first = token[0]
            if first == "|":
                if token == "|}" and self.open_counts[TABLE] and self.begins_line(start, " \t"):
                    self.drop_element(self.close_element(TABLE))
                    continue
                if stack and stack[-1].kind in (TEMPLATE, LINK):
                    stack[-1].separators.append(len(output))
                output.append(token)
            elif first == "[":
                self.on_open_bracket(token, match[1], match[2])
            elif first == "]":
                self.on_close_brackets(len(token))
            elif first == "<":
                position = self.on_tag(match) if match[6] else self.skip_comment(start)
            elif first == "}":
                self.on_close_braces(len(token))
            elif match[3]:
                arguments = (match[4] or "").split("|")[1:]
                output.append(expand_template(match[3], arguments, self.variables) or DROPPED_MARK)
            elif token == "{|":
                if self.begins_line(start, " \t:*#;"):
                    self.open_element(TABLE, token)
                else:
                    output.append(token)
            else:
                for _ in range(len(token) // 2 - 1):
                    self.open_element(TEMPLATE, "{{")
                self.open_element(TEMPLATE, "{{{" if len(token) % 2 else "{{")
        output.append(text[position:])
        return "".join(output)

    def begins_line(self, start: int, allowed: str) -> bool:
        """True if only `allowed` characters precede `start` on its line."""
        before = self.text[max(start - 20, 0) : start].rstrip(allowed)
        return before.endswith("\n") or (not before and start <= 20)

    def open_element(self, kind: str, token: str) -> None:
        self.stack.append(OpenElement(kind, len(self.output), []))
        self.open_counts[kind] += 1
        self.output.append(token)

    def close_element(self, kind: str) -> OpenElement:
        """Pop the innermost element of a kind. Elements inside it never closed and stay text."""
        while True:
            element = self.stack.pop()
            self.open_counts[element.kind] -= 1
            if element.kind == kind:
                return element

    def drop_element(self, element: OpenElement) -> None:
        del self.output[element.output_index :]
        self.output.append(DROPPED_MARK)

    def element_arguments(self, element: OpenElement) -> list[str]:
        """The text between the bars of an element that ends here."""
        bounds = (element.output_index, *element.separators, len(self.output))
        return ["".join(self.output[start + 1 : end]) for start, end in pairwise(bounds)]

    def on_open_bracket(self, token: str, target: str | None, label: str | None) -> None:
        if token[1:2] != "[":
            self.open_element(EXTERNAL_LINK, token)
            return
        if self.stack and self.stack[-1].kind == LINK and not self.stack[-1].separators:
            self.close_element(LINK)  # the target of a link contains no link
        if target is None:
            self.open_element(LINK, token)
        else:
            self.output.append(label or target)

    def on_close_brackets(self, count: int) -> None:
        """A run of brackets: external links take one each, links two; parity tells which of them is innermost."""
        external = self.innermost_external_links(count)
        while count:
            if count >= 2 and self.open_counts[LINK] and not (external and (count - external) % 2 == 0):
                self.close_link(self.close_element(LINK))
                count -= 2
                external = self.innermost_external_links(count)
            elif external:
                element = self.close_element(EXTERNAL_LINK)
                self.output[element.output_index] = ""
                count, external = count - 1, external - 1
            else:
                self.output.append("]" * count)
                return

    def innermost_external_links(self, limit: int) -> int:
        """Number of external links on top of the stack, up to `limit`."""
        count = 0
        while count < min(limit, len(self.stack)) and self.stack[-1 - count].kind == EXTERNAL_LINK:
            count += 1
        return count

    def close_link(self, element: OpenElement) -> None:
        if len(self.stack) >= MAX_DEPTH:
            self.drop_element(element)
            return
        target, *labels = self.element_arguments(element)
        if not target.strip() or "\n" in target:
            self.output.append("]]")
            return
        del self.output[element.output_index :]
        if target.lstrip()[0] == ":":
            self.output.append("|".join(labels) or target.replace(":", "", 1))
        elif not self.is_hidden_link(target.strip()):
            self.output.append("|".join(labels) or target)

    def is_hidden_link(self, target: str) -> bool:
        """True for links without text: an image, a category, the page in another language."""
        prefix, colon, _ = target.partition(":")
        is_language = LANGUAGE_PREFIX.fullmatch(prefix) and prefix not in NON_LANGUAGE_PREFIXES
        return bool(colon and (is_language or prefix.strip().replace("_", " ").lower() in self.hidden_namespaces))

    def on_close_braces(self, count: int) -> None:
        while count >= 2 and self.open_counts[TEMPLATE]:
            element = self.close_element(TEMPLATE)
            count -= min(len(self.output[element.output_index]), count)
            self.close_template(element)
        self.output.append("}" * count)

    def close_template(self, element: OpenElement) -> None:
        text = ""
        if len(self.stack) < MAX_DEPTH:
            name, *arguments = self.element_arguments(element)
            text = expand_template(name, arguments, self.variables)
        self.drop_element(element)
        if text:
            self.output[-1] = text

    def skip_comment(self, start: int) -> int:
        """Returns the position after the comment."""
        end = self.text.find("-->", start) if self.comment_may_close else -1
        if end < 0:
            self.comment_may_close = False
            self.output.append("<!--")
            return start + 4
        # A line with nothing but a comment is not a line.
        alone = self.text[start - 1 : start] == "\n" == self.text[end + 3 : end + 4]
        return end + 3 + alone

    def on_tag(self, match: re.Match[str]) -> int:
        """Returns the position to continue from."""
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
            self.output.append(superscript(power[1]))
            return power.end()
        elif "=" not in rest and rest.strip(" /"):
            self.output.append(match[0])  # not a tag: a<b and b>c
        return end

    def skip_or_copy_element(self, name: str, start: int) -> int:
        """Drop the content of a tag, or copy it as text. If the same tag opens again first, this one has no end.

        Returns the position to continue from.
        """
        for match in TAG_PATTERNS[name].finditer(self.text, start):
            if match[1]:
                content = self.text[start : match.start()]
                literal = decode_entities(content).translate(MARKUP_ENTITIES) if name in LITERAL_TAGS else DROPPED_MARK
                self.output.append(literal)
                return match.end()
            if not match[0].endswith("/>"):
                break
        return start

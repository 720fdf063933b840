"""Small dumps like those of Wikipedia: the export schema 0.11, several namespaces, redirects, many scripts."""

import bz2
import gzip
import random
from collections.abc import Iterable, Iterator, Sequence
from xml.sax.saxutils import escape

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" \
xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:schemaLocation="http://www.mediawiki.org/xml/export-0.11/ \
http://www.mediawiki.org/xml/export-0.11.xsd" version="0.11" xml:lang="de">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <dbname>dewiki</dbname>
    <base>https://de.wikipedia.org/wiki/Wikipedia:Hauptseite</base>
    <generator>MediaWiki 1.43.0-wmf.5</generator>
    <case>first-letter</case>
    <namespaces>
      <namespace key="-2" case="first-letter">Medium</namespace>
      <namespace key="0" case="first-letter" />
      <namespace key="1" case="first-letter">Diskussion</namespace>
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key="10" case="first-letter">Vorlage</namespace>
      <namespace key="14" case="first-letter">Kategorie</namespace>
    </namespaces>
  </siteinfo>
"""
TAIL = "</mediawiki>\n"
NOUNS = [
    "river",
    "town",
    "engine",
    "bridge",
    "valley",
    "museum",
    "island",
    "church",
    "theory",
    "東京",
    "Москва",
    "Köln",
]
VERBS = ["crosses", "joined", "left", "built", "found", "ruled", "wrote", "sold", "reached", "divided"]
OTHER = [
    "the",
    "a",
    "old",
    "new",
    "small",
    "which",
    "with",
    "under",
    "before",
    "first",
    "many",
    "its",
    "in",
    "of",
    "and",
]


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choice((NOUNS, VERBS, OTHER, OTHER)[chance.randrange(4)]) for _ in range(count))


def sentence(chance: random.Random) -> str:
    """With the markup of an ordinary one: some links, now and then a template or a reference."""
    noun = chance.choice(NOUNS)
    link = chance.choice((f"[[{noun}]]s", f"[[{noun} (place)|{words(chance, 2)}]]", f"''{noun}''", f"[[{noun}]]", noun))
    middle = chance.choice(
        ("", "", "", f" ({{{{lang|de|{noun}}}}})", f" {{{{convert|{chance.randrange(99)}|km|mi}}}}", ",")
    )
    source = f"url=https://example.org/{noun} |title={words(chance, 6)} |date=2 May 2019 |work=[[The Times]]"
    cite = f"{{{{cite web |{source}}}}}"
    note = chance.choice(("", "", f"<ref>{cite}</ref>", f'<ref name="{noun}" />'))
    return f"The {words(chance, 6)} {link}{middle} {words(chance, 8)} [[{words(chance, 2)}]].{note}"


def infobox(chance: random.Random) -> str:
    rows = "\n".join(f"| {words(chance, 1)}_{n} = [[{words(chance, 2)}]] {{{{nowrap|{n} m}}}}" for n in range(12))
    return f"{{{{Infobox place\n{rows}\n| image = Place.jpg <!-- a view -->\n}}}}\n"


def article(chance: random.Random, sections: int) -> str:
    parts = [infobox(chance), f"[[Datei:{words(chance, 1)}.jpg|mini|A [[view]] of {{{{nowrap|it}}}}]]\n"]
    for number in range(sections):
        parts += [f"\n== {words(chance, 2)} ==\n" if number else ""]
        parts += [" ".join(sentence(chance) for _ in range(chance.randrange(2, 7))) + "\n\n" for _ in range(2)]
        if number % 4 == 1:
            parts += [f"* {sentence(chance)}\n" for _ in range(4)]
        if number % 4 == 3:
            rows = "".join(f"|-\n| {words(chance, 2)} || [[{words(chance, 1)}]]\n" for _ in range(6))
            parts += ['{| class="wikitable"\n! a !! b\n', rows, "|}\n"]
    return "".join([*parts, "\n== References ==\n{{Reflist}}\n\n[[Kategorie:Places]]\n[[en:Place]]\n"])


def page(number: int, title: str, text: str, namespace: int = 0, redirect: str = "", model: str = "wikitext") -> str:
    target = f'\n    <redirect title="{escape(redirect)}" />' if redirect else ""
    return f"""  <page>
    <title>{escape(title)}</title>
    <ns>{namespace}</ns>
    <id>{number}</id>{target}
    <revision>
      <id>{number + 1000}</id>
      <parentid>{number + 900}</parentid>
      <timestamp>2024-05-06T07:08:09Z</timestamp>
      <contributor>
        <username>Ännchen</username>
        <id>7</id>
      </contributor>
      <comment>/* a &lt;b&gt; */</comment>
      <origin>{number + 1000}</origin>
      <model>{model}</model>
      <format>text/x-wiki</format>
      <text bytes="{len(text.encode())}" sha1="abc" xml:space="preserve">{escape(text)}</text>
      <sha1>abc</sha1>
    </revision>
  </page>
"""


def pages(count: int, seed: int = 0, sections: int = 4) -> Iterator[str]:
    """Articles, and among them redirects, talk, templates and style sheets."""
    chance = random.Random(seed)
    for number in range(1, count + 1):
        title = f"{chance.choice(NOUNS)} {number} & Söhne"
        kind = number % 10
        if kind == 3:
            yield page(number, title, "#WEITERLEITUNG [[Köln]]", redirect="Köln")
        elif kind == 5:
            yield page(number, f"Diskussion:{title}", "Is this so? ~~~~", namespace=1)
        elif kind == 7:
            yield page(number, f"Vorlage:{title}", "{{{1|}}}", namespace=10)
        elif kind == 9:
            yield page(number, f"{title}.css", "a { color: red }", model="css")
        else:
            yield page(number, title, article(chance, sections))


def dump(found: Iterable[str]) -> bytes:
    return (HEAD + "".join(found) + TAIL).encode()


def multistream(found: Sequence[str], each: int = 10) -> bytes:
    """As Wikimedia does it: a stream for the head, one for each so many pages, one for the end."""
    groups = ["".join(found[start : start + each]) for start in range(0, len(found), each)]
    return b"".join(bz2.compress(group.encode()) for group in (HEAD, *groups, TAIL))


def chopped(data: bytes, size: int = 5000) -> bytes:
    """bz2 streams that begin anywhere, as tools that compress in parallel make them."""
    return b"".join(bz2.compress(data[start : start + size], 1) for start in range(0, len(data), size))


KINDS = {
    "xml": dump,
    "xml.bz2": lambda found: bz2.compress(dump(found), 1),
    "xml.gz": lambda found: gzip.compress(dump(found)),
    "multistream.xml.bz2": multistream,
    "chopped.xml.bz2": lambda found: chopped(dump(found)),
}

"""Small dumps in the format of Wikipedia: export schema 0.11, several namespaces, redirects, many scripts."""

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


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice((NOUNS, VERBS, OTHER, OTHER)[rng.randrange(4)]) for _ in range(count))


def sentence(rng: random.Random) -> str:
    """A sentence with typical markup: some links, sometimes a template or a reference."""
    noun = rng.choice(NOUNS)
    link = rng.choice((f"[[{noun}]]s", f"[[{noun} (place)|{words(rng, 2)}]]", f"''{noun}''", f"[[{noun}]]", noun))
    middle = rng.choice(("", "", "", f" ({{{{lang|de|{noun}}}}})", f" {{{{convert|{rng.randrange(99)}|km|mi}}}}", ","))
    source = f"url=https://example.org/{noun} |title={words(rng, 6)} |date=2 May 2019 |work=[[The Times]]"
    cite = f"{{{{cite web |{source}}}}}"
    note = rng.choice(("", "", f"<ref>{cite}</ref>", f'<ref name="{noun}" />'))
    return f"The {words(rng, 6)} {link}{middle} {words(rng, 8)} [[{words(rng, 2)}]].{note}"


def infobox(rng: random.Random) -> str:
    rows = "\n".join(f"| {words(rng, 1)}_{n} = [[{words(rng, 2)}]] {{{{nowrap|{n} m}}}}" for n in range(12))
    return f"{{{{Infobox place\n{rows}\n| image = Place.jpg <!-- a view -->\n}}}}\n"


def article(rng: random.Random, sections: int) -> str:
    parts = [infobox(rng), f"[[Datei:{words(rng, 1)}.jpg|mini|A [[view]] of {{{{nowrap|it}}}}]]\n"]
    for number in range(sections):
        parts += [f"\n== {words(rng, 2)} ==\n" if number else ""]
        parts += [" ".join(sentence(rng) for _ in range(rng.randrange(2, 7))) + "\n\n" for _ in range(2)]
        if number % 4 == 1:
            parts += [f"* {sentence(rng)}\n" for _ in range(4)]
        if number % 4 == 3:
            rows = "".join(f"|-\n| {words(rng, 2)} || [[{words(rng, 1)}]]\n" for _ in range(6))
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
    """Articles, with redirects, talk pages, templates and style sheets among them."""
    rng = random.Random(seed)
    for number in range(1, count + 1):
        title = f"{rng.choice(NOUNS)} {number} & Söhne"
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
            yield page(number, title, article(rng, sections))


def dump(pages: Iterable[str]) -> bytes:
    return (HEAD + "".join(pages) + TAIL).encode()


def multistream(pages: Sequence[str], pages_per_stream: int = 10) -> bytes:
    """The format of Wikimedia: a bz2 stream for the head, one for each group of pages, one for the end."""
    starts = range(0, len(pages), pages_per_stream)
    groups = ["".join(pages[start : start + pages_per_stream]) for start in starts]
    return b"".join(bz2.compress(group.encode()) for group in (HEAD, *groups, TAIL))


def chopped(data: bytes, size: int = 5000) -> bytes:
    """bz2 streams that start anywhere, as parallel compressors write them."""
    return b"".join(bz2.compress(data[start : start + size], 1) for start in range(0, len(data), size))


KINDS = {
    "xml": dump,
    "xml.bz2": lambda pages: bz2.compress(dump(pages), 1),
    "xml.gz": lambda pages: gzip.compress(dump(pages)),
    "multistream.xml.bz2": multistream,
    "chopped.xml.bz2": lambda pages: chopped(dump(pages)),
}

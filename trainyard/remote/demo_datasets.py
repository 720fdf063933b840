"""Data sets that need no network: text and code of Python's standard library, in the formats of the large ones.

Every machine that runs trainyard has them. They depend on the version of Python only.
"""

import ast
import bz2
import json
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from trainyard.core.atomic_files import atomic_directory, atomic_file

MAX_CODE_BYTES = 4 << 20
PAGES_PER_STREAM = 100
"""Pages of one bzip2 stream, as in Wikipedia's multistream dumps."""
PROSE = re.compile(r"[A-Z][\w ,.;:'\"()/-]*[.:]")
"""A paragraph of plain sentences; code, tables and markup have other characters."""
SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"} | {
    f"{name}-packages" for name in ("site", "dist")
}
DUMP_START = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">
  <siteinfo>
    <sitename>Sample</sitename>
    <dbname>samplewiki</dbname>
    <namespaces><namespace key="0" case="first-letter" /></namespaces>
  </siteinfo>
"""
DUMP_END = "</mediawiki>\n"


@dataclass(frozen=True)
class DemoDataset:
    name: str
    description: str
    write: Callable[[Path], int]
    """Creates the directory; returns the number of documents."""
    next_command: str
    """The command of trainyard that uses it, with {dest} for its directory."""
    license: str = "Python Software Foundation License 2"


def write_wikipedia(path: Path) -> int:
    """A dump like Wikipedia's, with an article for each module that documents itself."""
    articles: list[str] = []
    for module, source in _modules():
        if paragraphs := list(_prose(module, source)):
            articles.append(_page(len(articles) + 1, module, paragraphs))
    parts = [articles[start : start + PAGES_PER_STREAM] for start in range(0, len(articles), PAGES_PER_STREAM)]
    streams = [DUMP_START, *map("".join, parts), DUMP_END]
    name = "samplewiki-latest-pages-articles-multistream.xml.bz2"
    with atomic_directory(path) as directory, atomic_file(directory / name) as file:
        file.writelines(bz2.compress(stream.encode()) for stream in streams)
    return len(articles)


def write_code(path: Path) -> int:
    """JSON lines with the source of each module, its path and its license."""
    count = size = 0
    with atomic_directory(path) as directory, atomic_file(directory / "python.jsonl") as file:
        for module, source in _modules():
            if source.strip() and size + len(source) <= MAX_CODE_BYTES:
                record = {"text": source, "path": f"{module.replace('.', '/')}.py", "license": "PSF-2.0"}
                file.write(json.dumps(record).encode() + b"\n")
                count, size = count + 1, size + len(source)
    return count


DEMO_DATASETS = {
    dataset.name: dataset
    for dataset in (
        DemoDataset(
            "sample-wikipedia",
            "documentation of Python's standard library as a Wikipedia dump; made here, without a network",
            write_wikipedia,
            "trainyard data extract {dest}/samplewiki-latest-pages-articles-multistream.xml.bz2 --output wiki",
        ),
        DemoDataset(
            "sample-code",
            "source files of Python's standard library as JSON lines; made here, without a network",
            write_code,
            "trainyard data train-tokenizer --input {dest}/python.jsonl --output tokenizer --vocab-size 512",
        ),
    )
}


def _modules() -> Iterator[tuple[str, str]]:
    """Name and source of the modules of the standard library, sorted, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_DIRECTORIES.isdisjoint(parts) and not any("test" in part or "-" in part for part in parts):
            try:
                yield ".".join(part for part in parts if part != "__init__"), path.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue


def _prose(module: str, source: str) -> Iterator[tuple[str, str]]:
    """Headings and paragraphs of plain sentences in the docstrings of a module."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                text = " ".join(paragraph.split())
                if PROSE.fullmatch(text):
                    yield getattr(node, "name", ""), text


def _page(number: int, title: str, paragraphs: list[tuple[str, str]]) -> str:
    lines, heading = [f"'''{title}''' is a module of Python."], ""
    for name, text in paragraphs:
        if name != heading:
            lines.append(f"== {name} ==")
            heading = name
        lines.append(text)
    body = escape("\n\n".join(lines))
    return (
        f"  <page>\n    <title>{escape(title)}</title>\n    <ns>0</ns>\n    <id>{number}</id>\n"
        f'    <revision>\n      <id>{number}</id>\n      <text xml:space="preserve">{body}</text>\n'
        "    </revision>\n  </page>\n"
    )

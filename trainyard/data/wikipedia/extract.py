"""A MediaWiki dump to JSON lines: shards of articles in the order of the dump, whatever the number of processes.

The parent cuts the dump into batches of pages, workers parse and clean them, the parent writes. Shards end where
batches do. After each shard a small file says where the next begins, so that a killed run goes on from there, and what
it leaves is byte for byte what it would have been.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from trainyard.core.atomic_files import whole_file
from trainyard.core.errors import RunStopped, UserError
from trainyard.data.prepare.worker_pool import ordered
from trainyard.data.wikipedia.dump import PAGE_END, Batch, Dump, Place, batches
from trainyard.data.wikipedia.progress import Job, State, save, shard_name
from trainyard.data.wikipedia.wikitext import clean

BATCH = 2 << 20
"""Bytes of XML for a worker at a time."""
THREADS = 16
"""At most so many unpack."""
PAGE = b"<page>"

ARTICLES, BYTES = "articles", "bytes"
REASONS = {
    "redirect": "redirects",
    "namespace": "in other namespaces",
    "model": "not wikitext",
    "short": "without text or too short",
    "malformed": "not well-formed",
}
"""Why a page is no article, and how that is said."""


class Bad(NamedTuple):
    """A page that could not be read."""

    path: Path
    byte: int
    """Of the XML."""
    why: str

    def __str__(self) -> str:
        return f"{self.path}: byte {self.byte} of its XML: {self.why}"


class Result(NamedTuple):
    """What a worker made of a batch."""

    lines: bytes
    counts: Counter[str]
    bad: list[tuple[int, str]]
    """Byte of the XML, and why."""
    file: int
    after: Place
    read: int
    broken: str


def extract(
    dumps: Sequence[Dump],
    output: Path,
    job: Job,
    state: State,
    workers: int,
    bad: Callable[[Bad], None],
    show: Callable[[int], None],
) -> None:
    """Write the rest of the shards. `bad` gets pages that cannot be read, and may raise; `show` gets the bytes of input
    that are done."""
    sizes = [dump.path.stat().st_size for dump in dumps]
    size = 0
    if not state.shards:
        save(dumps, output, job, state)  # from here on these shards are known to be ours

    def complete(shard: ExitStack) -> None:
        """It gets its name; then what is known of it is written down."""
        shard.close()
        state.shards += 1
        save(dumps, output, job, state)

    try:
        with ExitStack() as shard:
            for result in ordered(partial(read_pages, job), _batches(dumps, job, state.place, workers), workers):
                state.counts.update(result.counts)
                state.place = result.after
                path = dumps[result.file].path
                for byte, why in result.bad:
                    bad(Bad(path, byte, why))
                if result.broken:
                    count = state.counts[ARTICLES]
                    raise UserError(f"{path}: {result.broken}; {count:,} articles before that were complete")
                if result.lines:
                    if not size:
                        file = shard.enter_context(whole_file(output / shard_name(state.shards, job)))
                    file.write(result.lines)
                    size += result.counts[BYTES]
                if size >= job.shard_size:
                    complete(shard)
                    size = 0
                show(sum(sizes[: result.file]) + result.read)
            state.finished = True
            if size:
                complete(shard)
            else:
                save(dumps, output, job, state)
    except OSError as error:
        raise RunStopped(f"{output}: {error.strerror}; what is complete stays, and the same command goes on") from None


def read_pages(job: Job, item: tuple[Dump, Batch]) -> Result:
    """The articles of a batch as JSON lines."""
    dump, batch = item
    counts: Counter[str] = Counter()
    lines: list[str] = []
    bad: list[tuple[int, str]] = []
    at = batch.start
    *pages, rest = batch.xml.split(PAGE_END)
    for page in pages:
        start = page.rfind(PAGE)
        bad += _without_end(page[: max(start, 0)], at)
        if start < 0:
            bad.append((at + len(page), "</page> without <page>"))
        else:
            try:
                kind, line = read_page(page[start:] + PAGE_END, dump, job)
                counts[kind] += 1
                lines.append(line)
            except (ElementTree.ParseError, ValueError) as error:
                bad.append((at + start, str(error)))
        at += len(page) + len(PAGE_END)
    bad += _without_end(rest, at)
    text = "".join(lines).encode()
    counts["malformed"], counts[BYTES] = len(bad), len(text)
    if job.compress and text:
        text = gzip.compress(text, mtime=0)  # one member after the other is a file of gzip
    return Result(text, counts, bad, batch.file, batch.after, batch.read, batch.broken)


def read_page(xml: bytes, dump: Dump, job: Job) -> tuple[str, str]:
    """ARTICLES and its line, or why it is no article."""
    page = ElementTree.fromstring(xml)
    title, number = page.findtext("title"), page.findtext("id")
    if not title or not number:
        raise ValueError("a page without title or id")
    if int(page.findtext("ns") or 0) not in job.namespaces:
        return "namespace", ""
    if page.find("redirect") is not None:
        return "redirect", ""
    revisions = page.findall("revision")
    newest = revisions[-1] if revisions else page
    if newest.findtext("model") not in (None, "wikitext"):
        return "model", ""
    source = newest.findtext("text") or ""
    if source[:20].lstrip()[:9].lower() == "#redirect":
        return "redirect", ""
    text = clean(source, dump.names)
    if len(text) < max(job.min_text, 1):
        return "short", ""
    line = {"id": number, "url": f"{dump.base}?curid={number}", "title": title, "text": text}
    return ARTICLES, json.dumps(line, ensure_ascii=False) + "\n"


def _without_end(xml: bytes, at: int) -> list[tuple[int, str]]:
    """Pages that begin here: none of them ends."""
    return [(at + match.start(), "<page> without </page>") for match in re.finditer(PAGE, xml)]


def _batches(dumps: Sequence[Dump], job: Job, place: Place, workers: int) -> Iterator[tuple[Dump, Batch]]:
    """From a place on. The first has no page: it makes the workers start before threads do, which unpack the rest."""
    if place.file == len(dumps):
        return
    yield dumps[place.file], Batch(place.file, place.page, b"", place, 0)
    threads = min(workers // 2, THREADS)
    for file in range(place.file, len(dumps)):
        first = place if file == place.file else Place(file)
        for batch in batches(dumps[file].path, first, min(BATCH, job.shard_size), threads):
            yield dumps[file], batch
            if batch.broken:
                return

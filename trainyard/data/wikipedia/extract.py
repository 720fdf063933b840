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

from trainyard.core.atomic_files import atomic_file
from trainyard.core.errors import RunStopped, UserError
from trainyard.data.prepare.worker_pool import map_ordered
from trainyard.data.wikipedia.dump import PAGE_END, DumpPosition, PageBatch, WikiDump, page_batches
from trainyard.data.wikipedia.progress import ExtractOptions, ExtractState, save_state, shard_name
from trainyard.data.wikipedia.wikitext import wikitext_to_text

BATCH_BYTES = 2 << 20
"""Bytes of XML for a worker at a time."""
MAX_THREADS = 16
"""At most so many unpack."""
PAGE_START = b"<page>"

ARTICLE_COUNT, BYTE_COUNT = "articles", "bytes"
SKIP_REASONS = {
    "redirect": "redirects",
    "namespace": "in other namespaces",
    "model": "not wikitext",
    "short": "without text or too short",
    "malformed": "not well-formed",
}
"""Why a page is no article, and how that is said."""


class UnreadablePage(NamedTuple):
    """A page that could not be read."""

    path: Path
    xml_offset: int
    """Of the XML."""
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: byte {self.xml_offset} of its XML: {self.reason}"


class BatchResult(NamedTuple):
    """What a worker made of a batch."""

    json_lines: bytes
    counts: Counter[str]
    unreadable: list[tuple[int, str]]
    """Byte of the XML, and why."""
    file_index: int
    next_position: DumpPosition
    file_bytes_read: int
    error: str


def extract_articles(
    dumps: Sequence[WikiDump],
    output: Path,
    options: ExtractOptions,
    state: ExtractState,
    workers: int,
    on_unreadable: Callable[[UnreadablePage], None],
    on_progress: Callable[[int], None],
) -> None:
    """Write the rest of the shards. `bad` gets pages that cannot be read, and may raise; `show` gets the bytes of input
    that are done."""
    sizes = [dump.path.stat().st_size for dump in dumps]
    size = 0
    if not state.shards:
        save_state(dumps, output, options, state)  # from here on these shards are known to be ours

    def complete(shard: ExitStack) -> None:
        """It gets its name; then what is known of it is written down."""
        shard.close()
        state.shards += 1
        save_state(dumps, output, options, state)

    try:
        with ExitStack() as shard:
            for result in map_ordered(
                partial(parse_batch, options), _all_batches(dumps, options, state.place, workers), workers
            ):
                state.counts.update(result.counts)
                state.place = result.next_position
                path = dumps[result.file_index].path
                for byte, why in result.unreadable:
                    on_unreadable(UnreadablePage(path, byte, why))
                if result.error:
                    count = state.counts[ARTICLE_COUNT]
                    raise UserError(f"{path}: {result.error}; {count:,} articles before that were complete")
                if result.json_lines:
                    if not size:
                        file = shard.enter_context(atomic_file(output / shard_name(state.shards, options)))
                    file.write(result.json_lines)
                    size += result.counts[BYTE_COUNT]
                if size >= options.shard_size:
                    complete(shard)
                    size = 0
                on_progress(sum(sizes[: result.file_index]) + result.file_bytes_read)
            state.finished = True
            if size:
                complete(shard)
            else:
                save_state(dumps, output, options, state)
    except OSError as error:
        raise RunStopped(f"{output}: {error.strerror}; what is complete stays, and the same command goes on") from None


def parse_batch(job: ExtractOptions, item: tuple[WikiDump, PageBatch]) -> BatchResult:
    """The articles of a batch as JSON lines."""
    dump, batch = item
    counts: Counter[str] = Counter()
    lines: list[str] = []
    bad: list[tuple[int, str]] = []
    at = batch.xml_offset
    *pages, rest = batch.xml.split(PAGE_END)
    for page in pages:
        start = page.rfind(PAGE_START)
        bad += _unclosed_pages(page[: max(start, 0)], at)
        if start < 0:
            bad.append((at + len(page), "</page> without <page>"))
        else:
            try:
                kind, line = parse_page(page[start:] + PAGE_END, dump, job)
                counts[kind] += 1
                lines.append(line)
            except (ElementTree.ParseError, ValueError) as error:
                bad.append((at + start, str(error)))
        at += len(page) + len(PAGE_END)
    bad += _unclosed_pages(rest, at)
    text = "".join(lines).encode()
    counts["malformed"], counts[BYTE_COUNT] = len(bad), len(text)
    if job.compress and text:
        text = gzip.compress(text, mtime=0)  # one member after the other is a file of gzip
    return BatchResult(text, counts, bad, batch.file_index, batch.next_position, batch.file_bytes_read, batch.error)


def parse_page(xml: bytes, dump: WikiDump, job: ExtractOptions) -> tuple[str, str]:
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
    text = wikitext_to_text(source, dump.namespaces)
    if len(text) < max(job.min_text, 1):
        return "short", ""
    line = {"id": number, "url": f"{dump.base_url}?curid={number}", "title": title, "text": text}
    return ARTICLE_COUNT, json.dumps(line, ensure_ascii=False) + "\n"


def _unclosed_pages(xml: bytes, at: int) -> list[tuple[int, str]]:
    """Pages that begin here: none of them ends."""
    return [(at + match.start(), "<page> without </page>") for match in re.finditer(PAGE_START, xml)]


def _all_batches(
    dumps: Sequence[WikiDump], job: ExtractOptions, place: DumpPosition, workers: int
) -> Iterator[tuple[WikiDump, PageBatch]]:
    """From a place on. The first has no page: it makes the workers start before threads do, which unpack the rest."""
    if place.file_index == len(dumps):
        return
    yield dumps[place.file_index], PageBatch(place.file_index, place.xml_offset, b"", place, 0)
    threads = min(workers // 2, MAX_THREADS)
    for file in range(place.file_index, len(dumps)):
        first = place if file == place.file_index else DumpPosition(file)
        for batch in page_batches(dumps[file].path, first, min(BATCH_BYTES, job.shard_size), threads):
            yield dumps[file], batch
            if batch.error:
                return

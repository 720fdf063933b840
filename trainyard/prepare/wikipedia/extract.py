"""A MediaWiki dump to JSON lines: shards of articles in the order of the dump, for any number of processes.

The parent process cuts the dump into batches of pages, workers parse and clean them, and the parent writes. Shards end
at batch ends. After each shard a small file records where the next one starts, so a killed run resumes there, and its
output has the same bytes as that of an uninterrupted run.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from xml.etree import ElementTree

from trainyard.core.atomic_files import atomic_file, atomic_write_text
from trainyard.core.errors import RunStopped, UserError
from trainyard.core.file_lock import file_lock
from trainyard.core.quantities import counted
from trainyard.core.worker_pool import map_ordered
from trainyard.data.formats.documents import UnreadableRecord
from trainyard.prepare.wikipedia.dump import PAGE_END, DumpPosition, PageBatch, WikiDump, page_batches
from trainyard.prepare.wikipedia.template_rules import page_variables
from trainyard.prepare.wikipedia.wikitext import wikitext_to_text

BATCH_BYTES = 2 << 20
"""Bytes of XML per batch."""
MAX_THREADS = 16
"""Maximum threads that decompress."""
PAGE_START = b"<page>"

PROGRESS_FILE = ".extract.json"
LOCK_FILE = ".extract.lock"
SHARD_PATTERN = re.compile(r"wiki_\d{5,}\.jsonl(?:\.gz)?")

ARTICLE_COUNT, BYTE_COUNT = "articles", "bytes"
"""Keys of the counts, besides those of SKIP_REASONS."""
SKIP_REASONS = {
    "redirect": "redirects",
    "namespace": "in other namespaces",
    "model": "not wikitext",
    "short": "without text or too short",
    "malformed": "not well-formed",
}
"""Description for users of each reason for which a page is not an article."""


@dataclass(frozen=True)
class ExtractOptions:
    """Everything besides the dumps that determines the output bytes."""

    shard_size: int = 256 << 20
    """Approximate bytes of JSON text per shard."""
    namespaces: tuple[int, ...] = (0,)
    min_text: int = 0
    """Minimum characters of an article."""
    compress: bool = False
    """Write .jsonl.gz."""


START_POSITION = DumpPosition()


@dataclass
class ExtractState:
    """Progress of a run. The progress file holds it as of the last complete shard."""

    position: DumpPosition = START_POSITION
    shards: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Articles, bytes of JSON, and skipped pages by reason."""
    finished: bool = False


@contextmanager
def lock_output(output: Path) -> Iterator[None]:
    """Create the directory, keep other runs from writing to it, and remove incomplete files of a killed run."""
    lock = output / LOCK_FILE
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written: {error.strerror}") from None

    def busy() -> NoReturn:
        raise UserError(f"--output {output}: another run is writing there; wait for it, or use another directory")

    with file_lock(lock, busy):
        for path in [*output.glob(".wiki_*.part"), *output.glob(f".{PROGRESS_FILE}.*.part")]:
            path.unlink()
        yield


def load_state(dumps: Sequence[WikiDump], output: Path, options: ExtractOptions, restart: bool) -> ExtractState:
    """The state to resume from: the start, the end of the last complete shard, or finished."""
    progress = output / PROGRESS_FILE
    shards = sorted(path for path in output.iterdir() if SHARD_PATTERN.fullmatch(path.name))
    if restart:
        progress.unlink(missing_ok=True)
        for path in shards:
            path.unlink()
        return ExtractState()
    if not progress.exists():
        if shards:
            raise UserError(f"{output}: has {shards[0].name} but no {PROGRESS_FILE}; --restart removes such files")
        return ExtractState()
    try:
        saved = json.loads(progress.read_text())
        position, counts = DumpPosition(*saved["place"]), Counter(saved["counts"])
        state = ExtractState(position, int(saved["shards"]), counts, saved["finished"])
        previous = dict(saved["job"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{progress}: not a progress file of extract; pass --restart to start over") from None
    changed = [
        key.replace("_", " ") for key, value in _describe_run(dumps, options).items() if previous.get(key) != value
    ]
    if changed:
        raise UserError(
            f"{output}: the previous run used a different {', '.join(changed)}; pass --restart to start over"
        )
    for index in range(state.shards):
        if not (output / shard_name(index, options)).exists():
            raise UserError(f"{output}: {shard_name(index, options)} is missing; pass --restart to start over")
    return state


def shard_name(index: int, options: ExtractOptions) -> str:
    return f"wiki_{index:05d}.jsonl{'.gz' * options.compress}"


def save_state(dumps: Sequence[WikiDump], output: Path, options: ExtractOptions, state: ExtractState) -> None:
    saved = {
        "place": state.position,
        "shards": state.shards,
        "counts": state.counts,
        "finished": state.finished,
        "job": _describe_run(dumps, options),
    }
    atomic_write_text(output / PROGRESS_FILE, json.dumps(saved, indent=1) + "\n")


def _describe_run(dumps: Sequence[WikiDump], options: ExtractOptions) -> dict[str, Any]:
    """Everything that must be unchanged for a run to resume."""
    stats = [(dump.path.name, dump.path.stat()) for dump in dumps]
    files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return {"input": files, **asdict(options), "namespaces": list(options.namespaces)}


class BatchResult(NamedTuple):
    json_lines: bytes
    """The articles."""
    counts: Counter[str]
    unreadable: list[UnreadableRecord]
    batch: PageBatch
    """Without its XML."""


def extract_articles(
    dumps: Sequence[WikiDump],
    output: Path,
    options: ExtractOptions,
    state: ExtractState,
    workers: int,
    on_unreadable: Callable[[UnreadableRecord], None],
    on_progress: Callable[[int], None],
) -> None:
    """Write the remaining shards. `on_unreadable` may raise to stop; `on_progress` gets the input bytes done."""
    file_sizes = [dump.path.stat().st_size for dump in dumps]
    shard_bytes = 0
    if not state.shards:
        save_state(dumps, output, options, state)  # marks the shards in this directory as those of this run

    def complete(shard: ExitStack) -> None:
        """Give the shard its name, then record it."""
        shard.close()
        state.shards += 1
        save_state(dumps, output, options, state)

    try:
        with ExitStack() as shard:
            batches = _all_batches(dumps, options, state.position, workers)
            for result in map_ordered(partial(parse_batch, options), batches, workers):
                batch = result.batch
                state.counts.update(result.counts)
                state.position = batch.next_position
                for page in result.unreadable:
                    on_unreadable(page)
                if batch.error:
                    path, count = dumps[batch.file_index].path, state.counts[ARTICLE_COUNT]
                    raise UserError(f"{path}: {batch.error}; {counted(count, 'article', ',')} complete before that")
                if result.json_lines:
                    if not shard_bytes:
                        file = shard.enter_context(atomic_file(output / shard_name(state.shards, options)))
                    file.write(result.json_lines)
                    shard_bytes += result.counts[BYTE_COUNT]
                if shard_bytes >= options.shard_size:
                    complete(shard)
                    shard_bytes = 0
                on_progress(sum(file_sizes[: batch.file_index]) + batch.file_bytes_read)
            state.finished = True
            if shard_bytes:
                complete(shard)
            else:
                save_state(dumps, output, options, state)
    except OSError as error:
        raise RunStopped(
            f"{output}: {error.strerror}; complete shards are kept, and the same command resumes"
        ) from None


def parse_batch(options: ExtractOptions, item: tuple[WikiDump, PageBatch]) -> BatchResult:
    """The articles of a batch as JSON lines."""
    dump, batch = item
    counts: Counter[str] = Counter()
    lines: list[str] = []
    unreadable: list[UnreadableRecord] = []

    def report(xml_offset: int, reason: str) -> None:
        unreadable.append(UnreadableRecord(dump.path, f"byte {xml_offset} of its XML", reason))

    def report_unclosed(xml: bytes) -> None:
        for match in re.finditer(PAGE_START, xml):
            report(offset + match.start(), "<page> without </page>")

    offset = batch.xml_offset
    *pages, rest = batch.xml.split(PAGE_END)
    for page in pages:
        start = page.rfind(PAGE_START)
        report_unclosed(page[: max(start, 0)])
        if start < 0:
            report(offset + len(page), "</page> without <page>")
        else:
            try:
                kind, line = parse_page(page[start:] + PAGE_END, dump, options)
                counts[kind] += 1
                lines.append(line)
            except (ElementTree.ParseError, ValueError) as error:
                report(offset + start, str(error))
        offset += len(page) + len(PAGE_END)
    report_unclosed(rest)
    text = "".join(lines).encode()
    counts["malformed"], counts[BYTE_COUNT] = len(unreadable), len(text)
    if options.compress and text:
        text = gzip.compress(text, mtime=0)  # concatenated members form a valid gzip file
    return BatchResult(text, counts, unreadable, batch._replace(xml=b""))


def parse_page(xml: bytes, dump: WikiDump, options: ExtractOptions) -> tuple[str, str]:
    """ARTICLE_COUNT and the JSON line of an article, or a key of SKIP_REASONS and an empty line."""
    page = ElementTree.fromstring(xml)
    title, page_id = page.findtext("title"), page.findtext("id")
    if not title or not page_id:
        raise ValueError("a page without title or id")
    if int(page.findtext("ns") or 0) not in options.namespaces:
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
    variables = page_variables(title, newest.findtext("timestamp") or "")
    text = wikitext_to_text(source, dump.hidden_namespaces, variables)
    if len(text) < max(options.min_text, 1):
        return "short", ""
    article = {"id": page_id, "url": f"{dump.base_url}?curid={page_id}", "title": title, "text": text}
    return ARTICLE_COUNT, json.dumps(article, ensure_ascii=False) + "\n"


def _all_batches(
    dumps: Sequence[WikiDump], options: ExtractOptions, position: DumpPosition, workers: int
) -> Iterator[tuple[WikiDump, PageBatch]]:
    """Batches from a position on. The first one is empty: it makes the workers fork before decompression starts
    threads."""
    if position.file_index == len(dumps):
        return
    yield dumps[position.file_index], PageBatch(position.file_index, position.xml_offset, b"", position, 0)
    threads = min(workers // 2, MAX_THREADS)
    for index in range(position.file_index, len(dumps)):
        start = position if index == position.file_index else DumpPosition(index)
        for batch in page_batches(dumps[index].path, start, min(BATCH_BYTES, options.shard_size), threads):
            yield dumps[index], batch
            if batch.error:
                return

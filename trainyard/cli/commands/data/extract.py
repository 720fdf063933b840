"""`trainyard data extract`: convert a MediaWiki dump to JSON lines."""

import re
import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainyard.cli.console import ProgressDisplay, SkipReporter, fetch_inputs
from trainyard.cli.options import Strict, Workers, worker_count
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.data.formats.documents import expand_patterns
from trainyard.prepare.wikipedia.dump import open_dump
from trainyard.prepare.wikipedia.extract import (
    ARTICLE_COUNT,
    BYTE_COUNT,
    SKIP_REASONS,
    ExtractOptions,
    ExtractState,
    extract_articles,
    load_state,
    lock_output,
    shard_name,
)

BYTE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def extract(
    inputs: Annotated[
        list[str],
        Argument(metavar="DUMP...", help="Files or globs: XML, also compressed as .bz2 or .gz.", show_default=False),
    ],
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="Directory for wiki_00000.jsonl, ...")],
    shard_size: Annotated[
        str, Option(metavar="BYTES", help="Approximate JSON text per file, such as 256M or 1G.")
    ] = "256M",
    namespaces: Annotated[str, Option(metavar="N,N", help="Namespace numbers; 0 contains the articles.")] = "0",
    min_text: Annotated[int, Option(min=0, metavar="CHARS", help="Drop articles with less text.")] = 0,
    compress: Annotated[bool, Option("--compress", help="Write .jsonl.gz.")] = False,
    workers: Workers = None,
    strict: Strict = False,
    restart: Annotated[bool, Option("--restart", help="Remove existing shards in DIR and start over.")] = False,
) -> None:
    """Convert a MediaWiki dump to plain text: JSON lines with id, url, title and text.

    Articles stay in the order of the dump. Redirects, most templates, tables, images and references are dropped. If it
    is killed, the same command resumes after the last complete file.

    Examples:

      trainyard data extract enwiki-pages-articles-multistream.xml.bz2 -o wiki

      trainyard data extract 'dewiki-*.xml.bz2' --output wiki-de --min-text 200
    """
    options = ExtractOptions(_parse_bytes(shard_size), _parse_namespaces(namespaces), min_text, compress)
    dumps = [open_dump(path) for path in expand_patterns(fetch_inputs(inputs))]
    output = output.expanduser()
    total, start = sum(dump.path.stat().st_size for dump in dumps), time.monotonic()
    with lock_output(output):
        state = load_state(dumps, output, options, restart)
        if state.finished:
            print("already finished; pass --restart to start over")
        else:
            if state.shards:
                last = shard_name(state.shards - 1, options)
                print(f"resuming after {last}: {counted(state.counts[ARTICLE_COUNT], 'article', ',')} done")
            with ProgressDisplay("extract") as progress:

                def on_bytes(done: int) -> None:
                    progress.update(done, total, counted(state.counts[ARTICLE_COUNT], "article", ","))

                extract_articles(dumps, output, options, state, worker_count(workers), SkipReporter(strict), on_bytes)
    print(f"{format_summary(state)}, {time.monotonic() - start:.1f} s")
    if state.shards:
        first = output / shard_name(0, options)
        print(f"  {first}, ...   (next: trainyard data tokenize --input '{output}/*')")


def format_summary(state: ExtractState) -> str:
    counts = state.counts
    skipped = ", ".join(f"{counts[reason]:,} {label}" for reason, label in SKIP_REASONS.items() if counts[reason])
    return (
        f"{counted(counts[ARTICLE_COUNT], 'article', ',')}, {counts[BYTE_COUNT]:,} bytes of JSON "
        f"in {counted(state.shards, 'shard')}"
        f"{'; skipped: ' + skipped if skipped else ''}"
    )


def _parse_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match or not int(match[1]):
        raise UserError(f"--shard-size {text}: not a number of bytes; nearest: 256M")
    return int(match[1]) * BYTE_UNITS[match[2].upper()]


def _parse_namespaces(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(number) for number in text.split(",")}))
    except ValueError:
        raise UserError(f"--namespaces {text}: not comma-separated numbers; nearest: 0") from None

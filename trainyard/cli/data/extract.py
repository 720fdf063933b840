"""`trainyard data extract`: a MediaWiki dump to JSON lines."""

import glob
import os
import re
import time
from pathlib import Path
from typing import Annotated

import typer

from trainyard.cli.console import ProgressDisplay, SkipReporter
from trainyard.core.errors import UserError
from trainyard.data.wikipedia.dump import open_dump
from trainyard.data.wikipedia.extract import ARTICLE_COUNT, BYTE_COUNT, SKIP_REASONS
from trainyard.data.wikipedia.extract import extract_articles as write
from trainyard.data.wikipedia.progress import ExtractOptions, ExtractState, load_state, lock_output, shard_name

BYTE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def extract(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="DUMP...", help="Files or globs: XML, or .bz2 or .gz of it.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="For wiki_00000.jsonl and so on.")],
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="BYTES", help="Of JSON text in a file, about; K, M and G are known.")
    ] = "256M",
    namespaces: Annotated[
        str, typer.Option("--namespaces", metavar="N,N", help="By number; 0 has the articles.")
    ] = "0",
    min_text: Annotated[int, typer.Option("--min-text", min=0, metavar="CHARS", help="Leave out shorter ones.")] = 0,
    compress: Annotated[bool, typer.Option("--compress", help="Write .jsonl.gz.")] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes.", show_default="all cores")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="End at the first page that cannot be read.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Remove what is in DIR and begin anew.")] = False,
) -> None:
    """Turn a MediaWiki dump into plain text: JSON lines with id, url, title and text.

    Articles keep the order of the dump. Redirects are left out, and so are templates (but for a few), tables, pictures
    and references. A run that was killed goes on after its last complete file when it is started again.

    Examples:

      trainyard data extract enwiki-latest-pages-articles-multistream.xml.bz2 --output wiki

      trainyard data extract 'dewiki-*.xml.bz2' --output wiki-de --min-text 200 --workers 16
    """
    job = ExtractOptions(_parse_bytes(shard_size), _parse_namespaces(namespaces), min_text, compress)
    dumps = [open_dump(path) for path in _expand_globs(inputs)]
    output = output.expanduser()
    total, start = sum(dump.path.stat().st_size for dump in dumps), time.monotonic()

    with lock_output(output):
        state = load_state(dumps, output, job, restart)
        if state.finished:
            print("finished already; --restart begins anew")
        else:
            if state.shards:
                print(
                    f"goes on after {shard_name(state.shards - 1, job)}: {state.counts[ARTICLE_COUNT]:,} articles are there"
                )
            with ProgressDisplay("extract") as screen:

                def show(done: int) -> None:
                    screen.update(done, total, f"{state.counts[ARTICLE_COUNT]:,} articles")

                write(dumps, output, job, state, workers or os.cpu_count() or 1, SkipReporter(strict), show)
    print(f"{format_summary(state)}, {time.monotonic() - start:.1f} s")
    if state.shards:
        print(f"  {output / shard_name(0, job)} and so on   (trainyard data tokenize --input takes them)")


def format_summary(state: ExtractState) -> str:
    counts = state.counts
    skipped = ", ".join(f"{counts[reason]:,} {words}" for reason, words in SKIP_REASONS.items() if counts[reason])
    return (
        f"{counts[ARTICLE_COUNT]:,} articles, {counts[BYTE_COUNT]:,} bytes of JSON in {state.shards} shards"
        f"{'; skipped: ' + skipped if skipped else ''}"
    )


def _parse_bytes(words: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", words.strip(), re.IGNORECASE)
    if not match or not int(match[1]):
        raise UserError(f"--shard-size {words}: not a number of bytes; nearest: 256M")
    return int(match[1]) * BYTE_UNITS[match[2].upper()]


def _parse_namespaces(words: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(word) for word in words.split(",")}))
    except ValueError:
        raise UserError(f"--namespaces {words}: not numbers with commas between; nearest: 0") from None


def _expand_globs(patterns: list[str]) -> list[Path]:
    """By name or glob, sorted within each pattern."""
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        matches = [path] if path.exists() else [Path(match) for match in sorted(glob.glob(str(path)))]
        if not matches:
            raise UserError(f"{pattern}: no such file")
        found += matches
    return found

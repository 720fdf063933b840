"""`trainyard data inspect`: what is in a file, and whether all of it holds."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from trainyard.cli.console import ProgressDisplay
from trainyard.cli.data.tokenize import tokenizer_spec
from trainyard.data.prepare import inspect as inspection
from trainyard.data.prepare.length_stats import InspectOptions, InspectReport
from trainyard.data.text.tokenizer import Tokenizer, load_tokenizer

PROGRESS_DELAY_S = 2.0
"""Seconds before progress is shown."""
BAR_WIDTH = 40
"""Of the longest bar."""
BLOCK_EIGHTHS = " ▏▎▍▌▋▊▉"


def inspect(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH", help="PREFIX of .bin and .idx, Arrow directory, HDF5, JSON lines.")
    ],
    check: Annotated[bool, typer.Option("--check", help="Read and verify everything.")] = False,
    samples: Annotated[int, typer.Option("--samples", min=0, metavar="N", help="Show so many samples.")] = 0,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Shows samples as text: tokenizer.json, .model, or bytes.")
    ] = None,
    vocab_file: Annotated[
        str | None, typer.Option("--vocab-file", help="GPT-2's vocab.json, or BERT's vocab.txt.")
    ] = None,
    merge_file: Annotated[str | None, typer.Option("--merge-file", help="GPT-2's merges.txt.")] = None,
    vocab: Annotated[
        int | None, typer.Option("--vocab", min=1, metavar="N", help="Tokens are below N; default: the tokenizer's.")
    ] = None,
    json_key: Annotated[str, typer.Option("--json-key", help="The key or column with the text.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Say what is in prepared data: kind, counts, lengths; samples of it; and with --check, whether all of it holds.

    --check looks at every number: tokens below the vocabulary, sequences and documents without gaps, which token ends
    documents, labels and positions of packed blocks, masks of BERT's rows, each line of JSON. The first thing that
    cannot be right is said in one line, and the exit code is 2.

    Examples:

      trainyard data inspect wiki_text_document --samples 3 --vocab-file vocab.json --merge-file merges.txt

      trainyard data inspect wiki-8k train.hdf5 part-*.jsonl --check --json
    """
    known = (
        load_tokenizer(tokenizer_spec(tokenizer, None, vocab_file, merge_file, None))
        if tokenizer or vocab_file
        else None
    )
    limit = vocab or (known.vocab_size if known else None)
    wanted = InspectOptions(check, samples, limit, known.end_id if known else None, json_key)
    found = []
    for path in paths:
        with ProgressDisplay("inspect") as screen:
            start = time.monotonic()

            def show(
                done: int, total: int, screen: ProgressDisplay = screen, start: float = start, path: Path = path
            ) -> None:
                if time.monotonic() - start > PROGRESS_DELAY_S:
                    screen.update(min(done, total), total, str(path))

            report = inspection.inspect_path(path, wanted, show)
        if as_json:
            found.append(report_to_dict(report, known))
        else:
            encoding = sys.stdout.encoding or "utf-8"
            print(
                "\n".join(format_report(report, known)).encode(encoding, "backslashreplace").decode(encoding),
                flush=True,
            )
    if as_json:
        print(json.dumps({"files": found}))


def report_to_dict(report: InspectReport, known: Tokenizer | None) -> dict[str, Any]:
    samples = []
    for place, content in report.samples:
        tokens = {} if isinstance(content, str) else {"tokens": content}
        samples.append({"from": place, **tokens, "text": sample_text(content, known)})
    return {
        "path": report.path,
        "kind": report.kind,
        **{name.replace(" ", "_"): value for name, value in report.facts.items()},
        "lengths": report.lengths,
        "samples": samples,
    }


def sample_text(content: list[int] | str, known: Tokenizer | None) -> str | None:
    if isinstance(content, str) or known is None:
        return content if isinstance(content, str) else None
    return known.decode([token for token in content if 0 <= token < known.vocab_size])


def format_report(report: InspectReport, known: Tokenizer | None) -> list[str]:
    out = [f"{report.path}: {report.kind}"]
    for name, value in report.facts.items():
        out += [f"  {name:<28}{word}" for word in format_fact(name, value)[:1]]
        out += [f"  {'':<28}{word}" for word in format_fact(name, value)[1:]]
    for what, figures in report.lengths.items():
        if figures:
            numbers = (f"{name} {figures[name]:,.10g}" for name in ("shortest", "median", "longest"))
            out.append(f"  {what}: {', '.join(numbers)}, mean {figures['mean']:,.1f}")
            out += format_histogram(figures["histogram"])
    for place, content in report.samples:
        shown = sample_text(content, known)
        out.append(f"  {place}: {' '.join(map(str, content)) if shown is None else quote_for_terminal(shown)}")
    return out


def quote_for_terminal(words: str) -> str:
    """In one line, with nothing in it that a terminal would obey."""
    safe = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in words.replace("\\", "\\\\"))
    return f'"{"".join(safe)}"'


def format_fact(name: str, value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{key}: {kind}" for key, kind in value.items()] or ["none"]
    if isinstance(value, bool):
        return ["yes" if value else "no"]
    if name == "bytes":
        return [f"{value:,} ({value / 2**20:,.1f} MiB)" if value > 2**20 else f"{value:,}"]
    return [f"{value:,}" if isinstance(value, int) else str(value)]


def format_histogram(bins: list[dict[str, int]]) -> list[str]:
    """A line for each range of lengths; bars of eighths of a block, of # where the screen has no such."""
    most = max(each["count"] for each in bins)
    out = []
    for each in bins:
        eighths = -(-each["count"] * BAR_WIDTH * 8 // most)
        bar = "█" * (eighths // 8) + BLOCK_EIGHTHS[eighths % 8].strip()
        if "utf" not in (sys.stdout.encoding or "").lower():
            bar = "#" * -(-eighths // 8)
        span = f"{each['from']:,}" if each["from"] == each["to"] else f"{each['from']:,} to {each['to']:,}"
        out.append(f"    {span:>22} {each['count']:>13,} {bar}".rstrip())
    return out

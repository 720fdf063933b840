"""`trainyard data inspect`: report the contents of prepared data and check its integrity."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from trainyard.cli.commands.data.tokenize import tokenizer_spec
from trainyard.cli.console import ProgressDisplay, terminal_safe
from trainyard.cli.options import AsJson, JsonKey, MergeFile, TokenizerName, VocabFile
from trainyard.core.errors import UserError
from trainyard.data.text.tokenizer import Tokenizer, load_tokenizer
from trainyard.prepare.inspect import InspectOptions, InspectReport, inspect_path
from trainyard.remote.location import is_url

PROGRESS_DELAY_S = 2.0
"""Seconds before progress is shown."""
BAR_WIDTH = 40
"""Columns of the longest histogram bar."""
BLOCK_EIGHTHS = " ▏▎▍▌▋▊▉"


def inspect(
    paths: Annotated[
        list[str], Argument(metavar="PATH", help="PREFIX of .bin and .idx, Arrow directory, HDF5, JSON lines.")
    ],
    check: Annotated[bool, Option("--check", help="Read and verify everything.")] = False,
    samples: Annotated[int, Option(min=0, metavar="N", help="Number of samples to show.")] = 0,
    tokenizer: TokenizerName = None,
    vocab_file: VocabFile = None,
    merge_file: MergeFile = None,
    vocab: Annotated[
        int | None, Option(min=1, metavar="N", help="Vocabulary size for --check. Default: the tokenizer's.")
    ] = None,
    json_key: JsonKey = "text",
    as_json: AsJson = False,
) -> None:
    """Report format, counts and lengths of prepared data; show samples; with --check, verify every value.

    --check verifies tokens against the vocabulary, sequences and documents without gaps, the token that ends documents,
    labels and positions of packed blocks, masks of BERT samples, and each JSON line. The first error is reported in one
    line, with exit code 2. With a tokenizer, samples are shown as text.

    Examples:

      trainyard data inspect wiki --samples 3 --tokenizer tokenizer.json

      trainyard data inspect wiki-8k train.hdf5 part-*.jsonl --check --json
    """
    loaded = None
    if tokenizer or vocab_file:
        loaded = load_tokenizer(tokenizer_spec(tokenizer, None, vocab_file, merge_file, None))
    vocab_size = vocab or (loaded.vocab_size if loaded else None)
    options = InspectOptions(check, samples, vocab_size, loaded.end_id if loaded else None, json_key)
    reports = []
    for path in paths:
        if is_url(path):
            raise UserError(f"{path}: local files are inspected; nearest: `trainyard get {path}` first")
        report = _inspect_with_progress(Path(path), options)
        if as_json:
            reports.append(report_to_dict(report, loaded))
        else:
            encoding = sys.stdout.encoding or "utf-8"
            text = "\n".join(format_report(report, loaded))
            print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    if as_json:
        print(json.dumps({"files": reports}))


def _inspect_with_progress(path: Path, options: InspectOptions) -> InspectReport:
    start = time.monotonic()
    with ProgressDisplay("inspect") as progress:

        def on_progress(done: int, total: int) -> None:
            if time.monotonic() - start > PROGRESS_DELAY_S:
                progress.update(min(done, total), total, str(path))

        return inspect_path(path, options, on_progress)


def report_to_dict(report: InspectReport, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the report as plain data for `--json`."""
    samples = []
    for location, content in report.samples:
        tokens = {} if isinstance(content, str) else {"tokens": content}
        samples.append({"from": location, **tokens, "text": sample_text(content, tokenizer)})
    return {
        "path": report.path,
        "kind": report.kind,
        **{name.replace(" ", "_"): value for name, value in report.facts.items()},
        "lengths": report.lengths,
        "samples": samples,
    }


def sample_text(content: list[int] | str, tokenizer: Tokenizer | None) -> str | None:
    """Return a sample as text; None if it is tokens and there is no tokenizer."""
    if isinstance(content, str):
        return content
    return tokenizer.decode([token for token in content if 0 <= token < tokenizer.vocab_size]) if tokenizer else None


def format_report(report: InspectReport, tokenizer: Tokenizer | None) -> list[str]:
    lines = [f"{report.path}: {report.kind}"]
    for name, value in report.facts.items():
        first, *rest = format_fact(name, value)
        lines += [f"  {name:<28}{first}", *(f"  {'':<28}{line}" for line in rest)]
    for what, stats in report.lengths.items():
        if stats:
            numbers = (f"{name} {stats[name]:,.10g}" for name in ("shortest", "median", "longest"))
            lines.append(f"  {what}: {', '.join(numbers)}, mean {stats['mean']:,.1f}")
            lines += format_histogram(stats["histogram"])
    for location, content in report.samples:
        text = sample_text(content, tokenizer)
        lines.append(f"  {location}: {' '.join(map(str, content)) if text is None else quote_for_terminal(text)}")
    return lines


def quote_for_terminal(text: str) -> str:
    """Return the text in quotes on one line, with control characters escaped so that a terminal ignores them."""
    return '"' + terminal_safe(text.replace("\\", "\\\\")) + '"'


def format_fact(name: str, value: Any) -> list[str]:
    """Return one or more lines that describe a value of the report."""
    if isinstance(value, dict):
        return [f"{key}: {kind}" for key, kind in value.items()] or ["none"]
    if isinstance(value, bool):
        return ["yes" if value else "no"]
    if name == "bytes":
        return [f"{value:,} ({value / 2**20:,.1f} MiB)" if value > 2**20 else f"{value:,}"]
    return [f"{value:,}" if isinstance(value, int) else str(value)]


def format_histogram(bins: list[dict[str, int]]) -> list[str]:
    """Return one line per length range; bars use eighths of a block, or # if stdout cannot encode blocks."""
    largest = max(each["count"] for each in bins)
    lines = []
    for each in bins:
        eighths = -(-each["count"] * BAR_WIDTH * 8 // largest)
        bar = "█" * (eighths // 8) + BLOCK_EIGHTHS[eighths % 8].strip()
        if "utf" not in (sys.stdout.encoding or "").lower():
            bar = "#" * -(-eighths // 8)
        span = f"{each['from']:,}" if each["from"] == each["to"] else f"{each['from']:,} to {each['to']:,}"
        lines.append(f"    {span:>22} {each['count']:>13,} {bar}".rstrip())
    return lines

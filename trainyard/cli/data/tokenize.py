"""`trainyard data tokenize`: text to Megatron's .bin and .idx."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from trainyard.cli.console import ProgressDisplay, SkipReporter
from trainyard.cli.signals import interrupt_on_terminate
from trainyard.core.errors import UserError
from trainyard.data.formats import documents
from trainyard.data.prepare.tokenize import TokenizeCounts, TokenizeOptions, output_prefix, tokenize_files
from trainyard.data.text.tokenizer import TokenizerSpec

TOKENIZER_TYPES = {
    "GPT2BPETokenizer": ("gpt2", True),
    "BertWordPieceLowerCase": ("wordpiece", True),
    "BertWordPieceCase": ("wordpiece", False),
}
"""The reference's names: ours, and whether letters become small."""


def tokenize_command(
    inputs: Annotated[
        list[str],
        typer.Option("--input", help="File, glob or directory; may be given more than once.", show_default=False),
    ],
    prefix: Annotated[Path, typer.Option("--output-prefix", help="Files are PREFIX_KEY_document.bin and .idx.")],
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="tokenizer.json, SentencePiece .model, a directory with one, or bytes."),
    ] = None,
    kind: Annotated[str | None, typer.Option("--tokenizer-type", help=f"{', '.join(TOKENIZER_TYPES)}.")] = None,
    vocab_file: Annotated[
        str | None, typer.Option("--vocab-file", "--vocab", help="GPT-2's vocab.json, or BERT's vocab.txt.")
    ] = None,
    merge_file: Annotated[str | None, typer.Option("--merge-file", help="GPT-2's merges.txt.")] = None,
    end_of_text: Annotated[str | None, typer.Option("--end-of-text", help="The token that ends a document.")] = None,
    json_keys: Annotated[
        list[str] | None, typer.Option("--json-keys", help="Keys or columns with text; a set of files for each.")
    ] = None,
    append_eod: Annotated[bool, typer.Option("--append-eod", help="End each document with the end token.")] = False,
    split_sentences: Annotated[
        bool, typer.Option("--split-sentences", help="A sequence for each sentence (PREFIX_KEY_sentence), for BERT.")
    ] = False,
    keep_newlines: Annotated[bool, typer.Option("--keep-newlines", help="Between sentences, when splitting.")] = False,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Processes; all cores if not said.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="End at the first line that cannot be read.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
    dataset_impl: Annotated[str, typer.Option("--dataset-impl", hidden=True)] = "mmap",
    log_interval: Annotated[int, typer.Option("--log-interval", hidden=True)] = 0,
) -> None:
    """Turn text into Megatron's token files, byte for byte what its preprocess_data.py makes.

    Reads JSON lines (also .gz and .zst), .txt (a file is a document), Parquet, and directories that the datasets
    library saved. Nothing has its final name before it is complete; after a kill, start again.

    Examples:

      trainyard data tokenize --input 'wiki/*.jsonl' --output-prefix wiki --tokenizer-type GPT2BPETokenizer
      --vocab-file vocab.json --merge-file merges.txt --append-eod

      trainyard data tokenize --input part.parquet --output-prefix code --tokenizer tokenizer.json --append-eod
    """
    if dataset_impl != "mmap":
        raise UserError(f"--dataset-impl {dataset_impl}: only mmap is written; nearest: mmap")
    job = TokenizeOptions(
        tokenizer_spec(tokenizer, kind, vocab_file, merge_file, end_of_text),
        tuple(key for word in json_keys or ["text"] for key in word.replace(",", " ").split()),
        append_eod,
        split_sentences,
        keep_newlines,
    )
    prefix = prefix.expanduser()
    if not prefix.parent.is_dir() or not os.access(prefix.parent, os.W_OK):
        raise UserError(f"--output-prefix {prefix}: {prefix.parent} is no directory that can be written to")
    for key in job.text_keys:
        name = output_prefix(prefix, key, job)
        if name.with_name(f"{name.name}.idx").exists() and not overwrite:
            raise UserError(f"{name}.idx: is there already; --overwrite replaces it")
    paths = documents.resolve_inputs(inputs)
    total, start = documents.total_bytes(paths), time.monotonic()

    with ProgressDisplay("tokenize") as screen, interrupt_on_terminate():

        def show(done: int, counts: TokenizeCounts) -> None:
            rate = counts.tokens / (time.monotonic() - start)
            screen.update(done, total, f"{counts.documents:,} documents, {counts.tokens:,} tokens, {rate:,.0f}/s")

        counts = tokenize_files(paths, prefix, job, workers or os.cpu_count() or 1, SkipReporter(strict), show)
    seconds = time.monotonic() - start
    skipped = f", {counts.skipped:,} lines skipped" if counts.skipped else ""
    print(f"{counts.documents:,} documents, {counts.tokens:,} tokens in {seconds:.1f} s{skipped}")
    for key in job.text_keys:
        print(f"  {output_prefix(prefix, key, job)}.bin, .idx   (data.paths takes the name without .bin)")


def tokenizer_spec(
    tokenizer: str | None, kind: str | None, vocab_file: str | None, merge_file: str | None, end: str | None
) -> TokenizerSpec:
    """Which tokenizer the flags mean."""
    if tokenizer and kind:
        raise UserError("--tokenizer and --tokenizer-type: one of them says it")
    if kind and kind not in TOKENIZER_TYPES:
        raise UserError(f"--tokenizer-type {kind}: not known; nearest: {', '.join(TOKENIZER_TYPES)}")
    name, lowercase = TOKENIZER_TYPES[kind] if kind else (tokenizer or "", True)
    if not name and vocab_file:
        name = "gpt2" if merge_file else "wordpiece"
    if not name:
        raise UserError("--tokenizer: missing; a tokenizer.json, a .model, or --vocab-file with --merge-file (GPT-2)")
    return TokenizerSpec(name, vocab_file, merge_file, end, lowercase)

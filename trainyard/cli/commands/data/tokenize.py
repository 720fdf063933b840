"""`trainyard data tokenize`: convert text to Megatron .bin and .idx files."""

import os
import time
from pathlib import Path
from typing import Annotated

from typer import Option

from trainyard.cli.console import ProgressDisplay, SkipReporter, fetch_inputs, interrupt_on_terminate
from trainyard.cli.options import (
    EndOfText,
    Inputs,
    MergeFile,
    Overwrite,
    Strict,
    TokenizerName,
    Workers,
    split_keys,
    worker_count,
)
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.data.formats import documents
from trainyard.data.text.tokenizer import TokenizerSpec, localize
from trainyard.prepare.tokenize import TokenizeCounts, TokenizeOptions, output_prefix, tokenize_files

TOKENIZER_TYPES = {
    "GPT2BPETokenizer": ("gpt2", True),
    "BertWordPieceLowerCase": ("wordpiece", True),
    "BertWordPieceCase": ("wordpiece", False),
}
"""Megatron's tokenizer types: trainyard's name, and whether text is lowercased."""


def tokenize(
    inputs: Inputs,
    prefix: Annotated[
        Path, Option("--output-prefix", help="Prefix of PREFIX_KEY_document.bin and .idx.", show_default=False)
    ],
    tokenizer: TokenizerName = None,
    tokenizer_type: Annotated[str | None, Option(help=f"{', '.join(TOKENIZER_TYPES)}.")] = None,
    vocab_file: Annotated[
        str | None, Option("--vocab-file", "--vocab", help="vocab.json of GPT-2 or vocab.txt of BERT.")
    ] = None,
    merge_file: MergeFile = None,
    end_of_text: EndOfText = None,
    json_keys: Annotated[
        list[str] | None, Option(help="JSON keys or columns with text; one pair of files each.")
    ] = None,
    append_eod: Annotated[bool, Option("--append-eod", help="End each document with the end token.")] = False,
    split_sentences: Annotated[
        bool, Option("--split-sentences", help="Write one sequence per sentence (PREFIX_KEY_sentence), for BERT.")
    ] = False,
    keep_newlines: Annotated[bool, Option("--keep-newlines", help="Keep newlines between sentences.")] = False,
    workers: Workers = None,
    strict: Strict = False,
    overwrite: Overwrite = False,
    dataset_impl: Annotated[str, Option(hidden=True)] = "mmap",
    log_interval: Annotated[int, Option(hidden=True)] = 0,
) -> None:
    """Convert text to Megatron token files, byte for byte what Megatron's preprocess_data.py writes.

    Reads JSON lines (also .gz, .bz2 and .zst), .txt (one document per file), Parquet, directories of such files, and
    directories saved by the datasets library. Files are renamed into place only when complete; if the command is
    killed, run it again.

    Examples:

      trainyard data tokenize --input 'wiki/*.jsonl' --output-prefix wiki
      --vocab-file vocab.json --merge-file merges.txt --append-eod

      trainyard data tokenize --input part.parquet --output-prefix code
      --tokenizer tokenizer.json --append-eod

      trainyard data tokenize --input 'hf://datasets/OWNER/NAME/*.parquet'
      --output-prefix text --tokenizer OWNER/NAME --append-eod
    """
    if dataset_impl != "mmap":
        raise UserError(f"--dataset-impl {dataset_impl}: only mmap is supported; nearest: mmap")
    options = TokenizeOptions(
        tokenizer_spec(tokenizer, tokenizer_type, vocab_file, merge_file, end_of_text),
        tuple(split_keys(json_keys)),
        append_eod,
        split_sentences,
        keep_newlines,
    )
    prefix = prefix.expanduser()
    if not prefix.parent.is_dir() or not os.access(prefix.parent, os.W_OK):
        raise UserError(f"--output-prefix {prefix}: {prefix.parent} is not a writable directory")
    for key in options.text_keys:
        name = output_prefix(prefix, key, options)
        if name.with_name(f"{name.name}.idx").exists() and not overwrite:
            raise UserError(f"{name}.idx: already exists; --overwrite replaces it")
    paths = documents.resolve_inputs(fetch_inputs(inputs))
    total, start = documents.total_bytes(paths), time.monotonic()
    with ProgressDisplay("tokenize") as progress, interrupt_on_terminate():

        def on_progress(done: int, counts: TokenizeCounts) -> None:
            rate = counts.tokens / (time.monotonic() - start)
            progress.update(
                done, total, f"{counted(counts.documents, 'document', ',')}, {counts.tokens:,} tokens, {rate:,.0f}/s"
            )

        counts = tokenize_files(paths, prefix, options, worker_count(workers), SkipReporter(strict), on_progress)
    seconds = time.monotonic() - start
    skipped = f", {counted(counts.skipped, 'line', ',')} skipped" if counts.skipped else ""
    print(
        f"{counted(counts.documents, 'document', ',')}, {counted(counts.tokens, 'token', ',')} in "
        f"{seconds:.1f} s{skipped}"
    )
    for key in options.text_keys:
        name = output_prefix(prefix, key, options)
        print(f"  {name}.bin, .idx   (data.source=tokens data.paths=[{name}])")


def tokenizer_spec(
    tokenizer: str | None, tokenizer_type: str | None, vocab_file: str | None, merge_file: str | None, end: str | None
) -> TokenizerSpec:
    """Return the tokenizer that the flags select."""
    if tokenizer and tokenizer_type:
        raise UserError("--tokenizer and --tokenizer-type: use only one of them")
    if tokenizer_type and tokenizer_type not in TOKENIZER_TYPES:
        raise UserError(f"--tokenizer-type {tokenizer_type}: unknown; nearest: {', '.join(TOKENIZER_TYPES)}")
    name, lowercase = TOKENIZER_TYPES[tokenizer_type] if tokenizer_type else (tokenizer or "", True)
    if not name and vocab_file:
        name = "gpt2" if merge_file else "wordpiece"
    if not name:
        raise UserError("--tokenizer: missing; a tokenizer.json, a .model, or --vocab-file with --merge-file (GPT-2)")
    return localize(TokenizerSpec(name, vocab_file, merge_file, end, lowercase))

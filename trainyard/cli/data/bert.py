"""`trainyard data bert`: text to BERT's samples in HDF5 files."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from trainyard.cli.console import ProgressDisplay, SkipReporter
from trainyard.core.errors import UserError
from trainyard.data.formats import documents
from trainyard.data.prepare.bert_files import MAX_SAMPLES_PER_FILE, BertFileSet, build_bert_files
from trainyard.data.prepare.bert_samples import BertOptions
from trainyard.data.text.tokenizer import TokenizerSpec

PHASE_SIZES = {1: (128, 20), 2: (512, 80)}
"""Tokens and masked places of a sample."""


def bert(
    inputs: Annotated[
        list[str],
        typer.Option("--input", help="File, glob or directory; may be given more than once.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="For NAME_training_00000.hdf5 and so on.")],
    vocab_file: Annotated[str | None, typer.Option("--vocab-file", "--vocab", help="WordPiece's vocab.txt.")] = None,
    cased: Annotated[bool, typer.Option("--cased", help="Keep capitals and accents, with --vocab-file.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Instead of --vocab-file: tokenizer.json, .model or a directory.")
    ] = None,
    phase: Annotated[
        int, typer.Option("--phase", min=1, max=2, help="1: --sequence 128, --predictions 20; 2: 512 and 80.")
    ] = 1,
    sequence: Annotated[
        int | None, typer.Option("--sequence", min=8, max=65535, help="Tokens of a sample, at most.")
    ] = None,
    predictions: Annotated[
        int | None, typer.Option("--predictions", min=1, help="Masked places of a sample, at most.")
    ] = None,
    duplicate: Annotated[
        int,
        typer.Option("--duplicate", min=1, help="Use each document so often, each time with other pairs and masks."),
    ] = 1,
    short: Annotated[
        float, typer.Option("--short", min=0, max=1, help="Part of the documents that give shorter samples.")
    ] = 0.1,
    whole_word: Annotated[bool, typer.Option("--whole-word", help="Mask all pieces of a word or none.")] = False,
    json_keys: Annotated[
        list[str] | None, typer.Option("--json-keys", help="Keys or columns with the text; several are one document.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Of the files.")] = "bert",
    files: Annotated[
        int | None,
        typer.Option(
            "--files",
            min=1,
            max=99999,
            help="How many; trainyard reads any number on any number of ranks, other loaders want one for each rank or "
            f"more. If not said: so many that none has more than {MAX_SAMPLES_PER_FILE:,} samples.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same bytes.")] = 0,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Processes; all cores if not said.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="End at the first line that cannot be read.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files of this name.")] = False,
) -> None:
    """Make BERT's samples: pairs of text, half of them unrelated, with 15 % of the tokens masked.

    Reads JSON lines (also .gz and .zst), .txt (a file is a document), Parquet, and directories that the datasets
    library saved. Any --workers give the same bytes. Files get their names when all are complete; after a kill, start
    again.

    Examples:

      trainyard data bert --input 'wiki/*.jsonl' --output bert-128 --vocab-file vocab.txt --duplicate 5

      trainyard data bert --input 'wiki/*.jsonl' --output bert-512 --vocab-file vocab.txt --phase 2 --whole-word
    """
    sequence, predictions = sequence or PHASE_SIZES[phase][0], predictions or PHASE_SIZES[phase][1]
    if predictions > sequence - 3:
        raise UserError(f"--predictions {predictions}: a sample of {sequence} has {sequence - 3} words at most")
    if not name or "/" in name or set(name) & set("*?["):
        raise UserError(f"--name {name}: not a name for files; nearest: bert")
    recipe = BertOptions(
        _tokenizer_spec(vocab_file, cased, tokenizer), sequence, predictions, short, whole_word, duplicate, seed
    )
    keys = [key for word in json_keys or ["text"] for key in word.replace(",", " ").split()]
    paths = documents.resolve_inputs(inputs)
    output = output.expanduser()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from None
    start = time.monotonic()
    target = BertFileSet(output, name, files, overwrite)
    counts = build_bert_files(
        paths, keys, recipe, target, workers or os.cpu_count() or 1, SkipReporter(strict), ProgressDisplay
    )
    skipped = f", {counts.skipped:,} lines skipped" if counts.skipped else ""
    print(
        f"{counts.documents:,} documents, {counts.samples:,} samples, {counts.files:,} files "
        f"in {time.monotonic() - start:.1f} s{skipped}"
    )
    pattern = output / f"{name}_training_*.hdf5"
    words = f"data.paths=[{pattern}] data.seq_len={sequence} data.max_predictions={predictions}"
    print(f"  {pattern}   (data.source=hdf5 {words})")


def _tokenizer_spec(vocab_file: str | None, cased: bool, tokenizer: str | None) -> TokenizerSpec:
    """Which tokenizer the flags mean."""
    if tokenizer and (vocab_file or cased):
        raise UserError("--tokenizer: says all; leave out --vocab-file and --cased")
    if not tokenizer and not vocab_file:
        raise UserError("--vocab-file: missing; a WordPiece vocab.txt, or --tokenizer with a tokenizer.json")
    return TokenizerSpec(tokenizer) if tokenizer else TokenizerSpec("wordpiece", vocab_file, lowercase=not cased)

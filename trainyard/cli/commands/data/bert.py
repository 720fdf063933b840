"""`trainyard data bert`: create BERT samples in HDF5 files from text."""

import time
from pathlib import Path
from typing import Annotated

from typer import Option

from trainyard.cli.console import ProgressDisplay, SkipReporter, fetch_inputs
from trainyard.cli.options import Inputs, Overwrite, Strict, Workers, split_keys, worker_count
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.data.formats import documents
from trainyard.data.text.tokenizer import TokenizerSpec, localize
from trainyard.prepare.bert_files import MAX_SAMPLES_PER_FILE, BertFileSet, build_bert_files
from trainyard.prepare.bert_samples import BertOptions

PHASE_SIZES = {1: (128, 20), 2: (512, 80)}
"""Sequence length and masked positions per sample of each pre-training phase."""


def bert(
    inputs: Inputs,
    output: Annotated[Path, Option(metavar="DIR", help="Directory for NAME_training_00000.hdf5, ...")],
    vocab_file: Annotated[
        str | None, Option("--vocab-file", "--vocab", help="WordPiece vocabulary, vocab.txt.")
    ] = None,
    cased: Annotated[bool, Option("--cased", help="Keep case and accents, with --vocab-file.")] = False,
    tokenizer: Annotated[
        str | None, Option(help="Instead of --vocab-file: tokenizer.json, .model or a directory.")
    ] = None,
    phase: Annotated[int, Option(min=1, max=2, help="1: --seq-len 128, --max-predictions 20; 2: 512 and 80.")] = 1,
    seq_len: Annotated[int | None, Option(min=8, max=65535, help="Maximum tokens per sample.")] = None,
    max_predictions: Annotated[int | None, Option(min=1, help="Maximum masked positions per sample.")] = None,
    duplicate: Annotated[int, Option(min=1, help="Passes over each document, each with new pairs and masks.")] = 1,
    short: Annotated[float, Option(min=0, max=1, help="Fraction of the documents that give shorter samples.")] = 0.1,
    whole_word: Annotated[bool, Option("--whole-word", help="Mask all pieces of a word or none.")] = False,
    json_keys: Annotated[
        list[str] | None, Option(help="JSON keys or columns with the text; several form one document.")
    ] = None,
    name: Annotated[str, Option(help="Prefix of the file names.")] = "bert",
    files: Annotated[
        int | None,
        Option(
            min=1,
            max=99999,
            help="Number of files. trainyard reads any number on any number of ranks; other loaders need at least one "
            f"per rank. Default: as few as possible with at most {MAX_SAMPLES_PER_FILE:,} samples each.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, Option(min=0, help="The same seed gives the same bytes.")] = 0,
    workers: Workers = None,
    strict: Strict = False,
    overwrite: Overwrite = False,
) -> None:
    """Create BERT samples: sentence pairs, half of them unrelated, with 15 % of the tokens masked.

    Reads JSON lines (also .gz, .bz2 and .zst), .txt (one document per file), Parquet, and directories saved by the
    datasets library. The output does not depend on --workers. Files are renamed into place when all are complete; if
    the command is killed, run it again.

    Examples:

      trainyard data bert --input wiki --output bert-128 --vocab-file vocab.txt

      trainyard data bert --input wiki --output bert-512 --vocab-file vocab.txt
      --phase 2 --whole-word
    """
    seq_len, max_predictions = seq_len or PHASE_SIZES[phase][0], max_predictions or PHASE_SIZES[phase][1]
    if max_predictions > seq_len - 3:
        raise UserError(f"--max-predictions {max_predictions}: --seq-len {seq_len} allows at most {seq_len - 3}")
    if not name or "/" in name or set(name) & set("*?["):
        raise UserError(f"--name {name}: not a valid file name; nearest: bert")
    options = BertOptions(
        _tokenizer_spec(vocab_file, cased, tokenizer), seq_len, max_predictions, short, whole_word, duplicate, seed
    )
    paths = documents.resolve_inputs(fetch_inputs(inputs))
    output = output.expanduser()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from None
    start = time.monotonic()
    file_set = BertFileSet(output, name, files, overwrite)
    counts = build_bert_files(
        paths, split_keys(json_keys), options, file_set, worker_count(workers), SkipReporter(strict), ProgressDisplay
    )
    skipped = f", {counted(counts.skipped, 'line', ',')} skipped" if counts.skipped else ""
    print(
        f"{counted(counts.documents, 'document', ',')}, {counted(counts.samples, 'sample', ',')}, "
        f"{counted(counts.files, 'file', ',')} "
        f"in {time.monotonic() - start:.1f} s{skipped}"
    )
    pattern = output / f"{name}_training_*.hdf5"
    keys = f"data.paths=[{pattern}] data.seq_len={seq_len} data.max_predictions={max_predictions}"
    print(f"  {pattern}   (data.source=hdf5 {keys})")


def _tokenizer_spec(vocab_file: str | None, cased: bool, tokenizer: str | None) -> TokenizerSpec:
    """Return the tokenizer that the flags select."""
    if tokenizer and (vocab_file or cased):
        raise UserError("--tokenizer: cannot be combined with --vocab-file or --cased")
    if not tokenizer and not vocab_file:
        raise UserError("--vocab-file: missing; name a WordPiece vocab.txt, or use --tokenizer with a tokenizer.json")
    if tokenizer:
        return localize(TokenizerSpec(tokenizer))
    return localize(TokenizerSpec("wordpiece", vocab_file, lowercase=not cased))

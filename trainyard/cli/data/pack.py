"""`trainyard data pack`: tokens in blocks of one length, as the datasets library saves them."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from trainyard.cli.console import ProgressDisplay, SkipReporter
from trainyard.cli.data.tokenize import tokenizer_spec
from trainyard.cli.signals import interrupt_on_terminate
from trainyard.core.errors import UserError
from trainyard.data.formats import documents
from trainyard.data.formats.megatron_bin import MegatronTokens
from trainyard.data.prepare import pack as packing
from trainyard.data.prepare.pack import PackCounts, PackOptions, TokenChunk
from trainyard.data.prepare.tokenize import TokenizeOptions
from trainyard.data.text.tokenizer import Tokenizer, load_tokenizer


def pack(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT", help="PREFIX of .bin and .idx, or files of text.")],
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Gets its name when all is in it.")],
    sequence: Annotated[int, typer.Option("--sequence", min=1, max=1 << 24, help="Tokens of a block.")] = 4096,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="tokenizer.json, SentencePiece .model, a directory with one, or bytes."),
    ] = None,
    vocab_file: Annotated[
        str | None, typer.Option("--vocab-file", help="GPT-2's vocab.json, with --merge-file.")
    ] = None,
    merge_file: Annotated[str | None, typer.Option("--merge-file", help="GPT-2's merges.txt.")] = None,
    end_of_text: Annotated[str | None, typer.Option("--end-of-text", help="The token that ends a document.")] = None,
    json_key: Annotated[str, typer.Option("--json-key", help="The key or column with the text.")] = "text",
    append_eod: Annotated[
        bool,
        typer.Option(
            "--append-eod/--no-append-eod",
            help="End each document with the end token; one of a .bin that ends with it already stays as it is.",
        ),
    ] = True,
    keep_last: Annotated[
        bool, typer.Option("--keep-last", help="Fill up the last block, labels -100 there, instead of leaving it out.")
    ] = False,
    boundaries: Annotated[
        bool,
        typer.Option(
            "--boundaries/--no-boundaries", help="Write position_ids, which start at 0 in each document and block."
        ),
    ] = True,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Processes; all cores if not said.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="End at the first line that cannot be read.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a data set that is there.")] = False,
) -> None:
    """Lay documents one after the other and cut them into blocks of --sequence tokens, for training.

    Reads Megatron's token files, or text: JSON lines (also .gz and .zst), .txt (a file is a document), Parquet,
    and directories that the datasets library saved. Writes what datasets.load_from_disk loads: input_ids,
    attention_mask, labels (the same numbers as input_ids; transformers shifts them itself) and position_ids.
    No token is lost but those after the last whole block. The same input gives the same bytes with any --workers.

    The end token is the tokenizer's. Token files need no tokenizer if all their documents end with one token.

    Examples:

      trainyard data pack wiki_text_document --output wiki-8k --sequence 8192

      trainyard data pack part-*.jsonl.gz --output code-4k --tokenizer tokenizer.json
    """
    kinds = {_is_token_file(word) for word in inputs}
    if len(kinds) > 1:
        raise UserError(f"{', '.join(inputs)}: both token files and text; pack one kind at a time")
    paths = documents.resolve_inputs(inputs) if False in kinds else []
    chosen = (
        tokenizer_spec(tokenizer, None, vocab_file, merge_file, end_of_text)
        if paths or tokenizer or vocab_file
        else None
    )
    known = load_tokenizer(chosen) if chosen else None
    end = known.end_id if known else None
    if chosen and paths:
        total = documents.total_bytes(paths)
        parts = packing.chunks_from_text(
            paths, TokenizeOptions(chosen, (json_key,), append_eod), workers or os.cpu_count() or 1
        )
    else:
        sets = [MegatronTokens(Path(word)) for word in inputs]
        total = sum(each.tokens.nbytes for each in sets)
        if not known and append_eod:
            end = next((last for each in sets if (last := packing.guess_end_token(each)) is not None), None)
            print(f"no --tokenizer: token {end}, with which documents end, is taken for the end token")
        parts = _documents_of(sets, end if append_eod else None, known)
    start = time.monotonic()
    with ProgressDisplay("pack") as screen, interrupt_on_terminate():

        def show(done: int, counts: PackCounts) -> None:
            rate = counts.tokens / (time.monotonic() - start)
            screen.update(done, total, f"{counts.tokens:,} tokens, {rate / 1e6:.1f} M/s")

        shape = PackOptions(sequence, keep_last, end or 0, boundaries)
        counts = packing.write_blocks(parts, output, shape, overwrite, SkipReporter(strict), show)
    seconds = time.monotonic() - start
    skipped = f", {counts.skipped:,} skipped" if counts.skipped else ""
    print(f"{counts.documents:,} documents, {counts.tokens:,} tokens in {seconds:.1f} s{skipped}")
    rest = ""
    if counts.leftover_tokens and keep_last:
        rest = f", the last one padded after {counts.leftover_tokens:,} tokens"
    elif counts.leftover_tokens:
        rest = f"; {counts.leftover_tokens:,} tokens at the end fill no block and are left out (--keep-last pads them)"
    print(f"{counts.blocks:,} blocks of {sequence:,}{rest}")
    print(f"  {output}   (data.source=arrow data.paths=[{output}] data.seq_len={sequence}; datasets.load_from_disk)")


def _is_token_file(word: str) -> bool:
    path = Path(word).expanduser()
    return path.suffix in (".bin", ".idx") or (not path.is_file() and Path(f"{path}.idx").is_file())


def _documents_of(sets: list[MegatronTokens], end: int | None, known: Tokenizer | None) -> Iterator[TokenChunk]:
    for each in sets:
        yield from packing.chunks_from_tokens(
            each, end, known.vocab_size if known else None, end_is_guess=known is None
        )

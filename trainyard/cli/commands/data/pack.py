"""`trainyard data pack`: pack tokens into blocks of fixed length, in the format of the datasets library."""

import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainyard.cli.commands.data.tokenize import tokenizer_spec
from trainyard.cli.console import ProgressDisplay, SkipReporter, fetch_inputs, interrupt_on_terminate
from trainyard.cli.options import (
    EndOfText,
    JsonKey,
    MergeFile,
    Overwrite,
    Strict,
    TokenizerName,
    VocabFile,
    Workers,
    worker_count,
)
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.data.formats import documents
from trainyard.data.formats.megatron_bin import MegatronTokens, is_token_file
from trainyard.data.text.tokenizer import load_tokenizer
from trainyard.prepare import pack as packing
from trainyard.prepare.pack import PackCounts, PackOptions, TokenChunk
from trainyard.prepare.tokenize import TokenizeOptions


def pack(
    inputs: Annotated[list[str], Argument(metavar="INPUT", help="PREFIX of .bin and .idx, or text files.")],
    output: Annotated[Path, Option(metavar="DIR", help="Output directory; renamed into place when complete.")],
    seq_len: Annotated[int, Option(min=1, max=1 << 24, help="Tokens per block.")] = 4096,
    tokenizer: TokenizerName = None,
    vocab_file: VocabFile = None,
    merge_file: MergeFile = None,
    end_of_text: EndOfText = None,
    json_key: JsonKey = "text",
    append_eod: Annotated[
        bool,
        Option(
            "--append-eod/--no-append-eod",
            help="End each document with the end token; token files that already have it stay unchanged.",
        ),
    ] = True,
    keep_last: Annotated[
        bool, Option("--keep-last", help="Pad the last block (labels -100) instead of dropping it.")
    ] = False,
    boundaries: Annotated[
        bool,
        Option("--boundaries/--no-boundaries", help="Write position_ids, which restart in each document and block."),
    ] = True,
    workers: Workers = None,
    strict: Strict = False,
    overwrite: Overwrite = False,
) -> None:
    """Concatenate documents and split them into blocks of --seq-len tokens, for training.

    Reads Megatron token files, or text: JSON lines (also .gz, .bz2 and .zst), .txt (one document per file), Parquet,
    and directories saved by the datasets library. Writes what datasets.load_from_disk loads: input_ids, attention_mask,
    labels (same values as input_ids; transformers shifts them) and position_ids. Only the tokens after the last
    complete block are dropped. The output does not depend on --workers.

    The end token comes from the tokenizer. Token files need no tokenizer if all documents end with the same token.

    Examples:

      trainyard data pack wiki_text_document --output wiki-8k --seq-len 8192

      trainyard data pack *.jsonl.gz --output code-4k --tokenizer tokenizer.json
    """
    inputs = fetch_inputs(inputs)
    kinds = {is_token_file(Path(name)) for name in inputs}
    if len(kinds) > 1:
        raise UserError(f"{', '.join(inputs)}: both token files and text; pack one kind at a time")
    paths = documents.resolve_inputs(inputs) if False in kinds else []
    spec = None
    if paths or tokenizer or vocab_file:
        spec = tokenizer_spec(tokenizer, None, vocab_file, merge_file, end_of_text)
    loaded = load_tokenizer(spec) if spec else None
    end_token = loaded.end_id if loaded else None
    if spec and paths:
        total = documents.total_bytes(paths)
        options = TokenizeOptions(spec, (json_key,), append_eod)
        chunks: Iterable[TokenChunk] = packing.chunks_from_text(paths, options, worker_count(workers))
    else:
        datasets = [MegatronTokens(Path(name)) for name in inputs]
        total = sum(dataset.tokens.nbytes for dataset in datasets)
        if not loaded and append_eod:
            guesses = (packing.guess_end_token(dataset) for dataset in datasets)
            end_token = next((guess for guess in guesses if guess is not None), None)
            print(f"no --tokenizer: using token {end_token}, with which documents end, as the end token")
        end, vocab_size = end_token if append_eod else None, loaded.vocab_size if loaded else None
        chunks = chain.from_iterable(
            packing.chunks_from_tokens(dataset, end, vocab_size, end_is_guess=loaded is None) for dataset in datasets
        )
    start = time.monotonic()
    with ProgressDisplay("pack") as progress, interrupt_on_terminate():

        def on_progress(done: int, counts: PackCounts) -> None:
            rate = counts.tokens / (time.monotonic() - start)
            progress.update(done, total, f"{counts.tokens:,} tokens, {rate / 1e6:.1f} M/s")

        pack_options = PackOptions(seq_len, keep_last, end_token or 0, boundaries)
        counts = packing.write_blocks(chunks, output, pack_options, overwrite, SkipReporter(strict), on_progress)
    seconds = time.monotonic() - start
    skipped = f", {counts.skipped:,} skipped" if counts.skipped else ""
    print(
        f"{counted(counts.documents, 'document', ',')}, {counted(counts.tokens, 'token', ',')} in "
        f"{seconds:.1f} s{skipped}"
    )
    left, remainder = counts.leftover_tokens, ""
    if left and keep_last:
        remainder = f", the last one padded after {counted(left, 'token', ',')}"
    elif left:
        remainder = f"; the last {left:,} tokens fill no block and are dropped (--keep-last pads them)"
    print(f"{counted(counts.blocks, 'block', ',')} of {seq_len:,}{remainder}")
    print(f"  {output}   (data.source=arrow data.paths=[{output}] data.seq_len={seq_len}; datasets.load_from_disk)")

"""`trainyard data train-tokenizer`: train a BPE or WordPiece tokenizer on text."""

import time
from pathlib import Path
from typing import Annotated

from typer import Option

from trainyard.cli.console import ProgressDisplay, SkipReporter, fetch_inputs
from trainyard.cli.options import Inputs, JsonKey, Overwrite, Strict
from trainyard.core.errors import UserError
from trainyard.data.formats import documents
from trainyard.data.text.tokenizer import NAMED_TOKENIZERS
from trainyard.prepare.train_tokenizer import KINDS, TokenizerOptions
from trainyard.prepare.train_tokenizer import train_tokenizer as run_training


def train_tokenizer(
    inputs: Inputs,
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="Directory to create.")],
    vocab_size: Annotated[int, Option(min=1, help="Number of tokens, the special ones included.")] = 32_000,
    kind: Annotated[str, Option(help="bpe (byte level, as GPT-2 and Llama 3) or wordpiece (as BERT).")] = "bpe",
    end_of_text: Annotated[str, Option(help="Token that ends a document, for bpe.")] = "<|endoftext|>",
    cased: Annotated[bool, Option("--cased", help="Keep case and accents, for wordpiece.")] = False,
    json_key: JsonKey = "text",
    strict: Strict = False,
    overwrite: Overwrite = False,
) -> None:
    """Train a tokenizer on text and write it in the formats of transformers and of GPT-2 or BERT.

    DIR gets tokenizer.json and tokenizer_config.json, and vocab.json with merges.txt (bpe) or vocab.txt (wordpiece).
    The same text gives the same files. A few hundred MB of text are enough for a vocabulary of 32,000 tokens; the
    counts of all words are kept in memory.

    Examples:

      trainyard data train-tokenizer --input 'wiki/*.jsonl' --output tokenizer

      trainyard data train-tokenizer --input 'wiki/*.jsonl' -o bert-tokenizer
      --kind wordpiece --vocab-size 30522
    """
    if kind not in KINDS:
        raise UserError(f"--kind {kind}: unknown; nearest: {' or '.join(KINDS)}")
    output = output.expanduser()
    if output.exists() and not overwrite:
        raise UserError(f"--output {output}: already exists; --overwrite replaces it")
    options = TokenizerOptions(kind, vocab_size, json_key, end_of_text, not cased)
    paths = documents.resolve_inputs(fetch_inputs(inputs))
    total, start, skip = documents.total_bytes(paths), time.monotonic(), SkipReporter(strict)
    with ProgressDisplay("read text") as progress:
        size = run_training(paths, output, options, skip, lambda done: progress.update(done, total, ""))
    if size < vocab_size:
        print(f"the text has no more than {size:,} tokens worth keeping")
    print(f"{size:,} tokens from {total / 2**20:,.1f} MiB of text in {time.monotonic() - start:.1f} s")
    files = "vocab.json, merges.txt" if kind == "bpe" else "vocab.txt"
    name = f"./{output}" if str(output) in NAMED_TOKENIZERS else output
    print(f"  {output}/tokenizer.json, {files}   (data.tokenizer={name})")

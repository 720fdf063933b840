"""Train a tokenizer on documents: byte-level BPE as in GPT-2 and Llama 3, or WordPiece as in BERT."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers, processors, trainers

from trainyard.core.atomic_files import atomic_directory
from trainyard.core.errors import UserError
from trainyard.data.formats import documents
from trainyard.data.formats.documents import UnreadableRecord
from trainyard.data.text.tokenizer import BERT_TOKENS, UNKNOWN_TOKEN, byte_level, wordpiece

KINDS = ("bpe", "wordpiece")
MAX_VOCAB_SIZE = 2**24
"""The tokenizers library reserves memory for the entire vocabulary, and aborts the process if there is too little."""
BYTE_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


class TokenizerOptions(NamedTuple):
    kind: str
    """bpe or wordpiece."""
    vocab_size: int
    text_key: str = "text"
    end_token: str = "<|endoftext|>"
    """Token that ends a document; bpe only."""
    lowercase: bool = True
    """Lowercase the text and strip accents; wordpiece only."""

    @property
    def min_vocab_size(self) -> int:
        """All bytes and the end token; for WordPiece the special tokens and some letters."""
        return len(BYTE_ALPHABET) + 1 if self.kind == "bpe" else len(BERT_TOKENS) + 64


def train_tokenizer(
    paths: Sequence[Path],
    output: Path,
    options: TokenizerOptions,
    on_unreadable: Callable[[UnreadableRecord], None],
    on_bytes: Callable[[int], None],
) -> int:
    """Write the tokenizer's files into the directory `output`; returns the size of its vocabulary.

    The files are tokenizer.json and tokenizer_config.json for transformers, and GPT-2's vocab.json and merges.txt or
    BERT's vocab.txt.
    """
    if options.vocab_size < options.min_vocab_size:
        raise UserError(f"--vocab-size {options.vocab_size}: {options.kind} needs at least {options.min_vocab_size}")
    if options.vocab_size > MAX_VOCAB_SIZE:
        raise UserError(f"--vocab-size {options.vocab_size}: must be at most {MAX_VOCAB_SIZE}; nearest: 32000")
    texts = _texts(paths, options.text_key, on_unreadable, on_bytes)
    if options.kind == "bpe":
        fast = byte_level(models.BPE())
        trainer: Any = trainers.BpeTrainer(
            vocab_size=options.vocab_size - 1, initial_alphabet=BYTE_ALPHABET, show_progress=False
        )
        fast.train_from_iterator(texts, trainer=trainer)
        _append_end_token(fast, options.end_token)
    else:
        letters = wordpiece(models.WordPiece(unk_token=UNKNOWN_TOKEN), options.lowercase)
        first_pass = _texts(paths, options.text_key, lambda _: None, on_bytes)
        letters.train_from_iterator(first_pass, trainer=_wordpiece_trainer(options, BERT_TOKENS, vocab_size=0))
        fast = wordpiece(models.WordPiece(unk_token=UNKNOWN_TOKEN), options.lowercase)
        tokens = (*BERT_TOKENS, *sorted(token for token in letters.get_vocab() if token.startswith("##")))
        fast.train_from_iterator(texts, trainer=_wordpiece_trainer(options, tokens, options.vocab_size))
        fast = _with_special_tokens(fast, options.lowercase)
        _add_bert_template(fast)
    with atomic_directory(output) as directory:
        fast.model.save(str(directory))
        fast.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps(_transformers_config(options), indent=2) + "\n")
        for path in directory.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return fast.get_vocab_size()


def _texts(
    paths: Sequence[Path], key: str, on_unreadable: Callable[[UnreadableRecord], None], on_bytes: Callable[[int], None]
) -> Iterator[list[str]]:
    done, has_text = 0, False
    for input_slice in documents.input_slices(paths):
        records, unreadable = documents.read_documents(input_slice, [key])
        for record in unreadable:
            on_unreadable(record)
        texts = [text for (text,) in records]
        has_text |= any(text.strip() for text in texts)
        yield texts
        done += input_slice.input_bytes
        on_bytes(done)
    if not has_text:
        raise UserError(f"{', '.join(map(str, paths[:3]))}: no text to train on")


def _wordpiece_trainer(options: TokenizerOptions, first_tokens: Sequence[str], vocab_size: int) -> Any:
    """A trainer whose vocabulary starts with `first_tokens`.

    Left alone, it numbers the letters within words (##a, ...) in the order of a hash table with a random seed. Merges
    of equal count follow these numbers, so that every run would give another vocabulary.
    """
    # Letters of the alphabet are counted twice: as the start of a word and as its continuation.
    alphabet = (options.vocab_size - len(BERT_TOKENS)) // 2
    return trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(first_tokens),
        limit_alphabet=min(alphabet, 1000),
        show_progress=False,
    )


def _append_end_token(fast: Fast, token: str) -> None:
    """The end token is the last id and part of the model's vocabulary, as in GPT-2's vocab.json."""
    model = json.loads(fast.to_str())["model"]
    vocab = model["vocab"] | {token: len(model["vocab"])}
    fast.model = models.BPE(vocab, [tuple(pair) for pair in model["merges"]])
    fast.add_special_tokens([token])


def _with_special_tokens(fast: Fast, lowercase: bool) -> Fast:
    """The same vocabulary, of which only BERT's tokens are special."""
    vocab = json.loads(fast.to_str())["model"]["vocab"]
    result = wordpiece(models.WordPiece(vocab, unk_token=UNKNOWN_TOKEN), lowercase)
    result.add_special_tokens(list(BERT_TOKENS))
    return result


def _add_bert_template(fast: Fast) -> None:
    """Encoding with special tokens gives [CLS] A [SEP] B [SEP]."""
    first, last = (fast.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", first), ("[SEP]", last)]
    )


def _transformers_config(options: TokenizerOptions) -> dict[str, Any]:
    if options.kind == "bpe":
        end = options.end_token
        return {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end}
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    tokens = dict(zip(names, BERT_TOKENS, strict=True))
    return {"tokenizer_class": "BertTokenizerFast", "do_lower_case": options.lowercase, **tokens}

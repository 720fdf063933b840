"""From text to token numbers: bytes, GPT-2's vocab and merges, a tokenizer.json, SentencePiece, WordPiece."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers

from trainyard.core.errors import UserError, one_line
from trainyard.data.text.gpt2_fast_bpe import Words

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<｜end▁of▁sentence｜>", "<eos>", "[SEP]")

Encoded = tuple[NDArray[np.int32], NDArray[np.int64]]
"""Tokens of some texts, one after the other, and how many each text has."""


class Spec(NamedTuple):
    """Which tokenizer: by name, with files, or by path."""

    name: str
    """bytes, gpt2, wordpiece, or the path of a tokenizer.json, of a SentencePiece model, or of a directory with one."""
    vocab_file: str | None = None
    """vocab.json of gpt2, vocab.txt of wordpiece."""
    merges_file: str | None = None
    end: str | None = None
    """The token after each document; default: the tokenizer's own."""
    lowercase: bool = True
    """For wordpiece."""


class Tokenizer(Protocol):
    vocab: int
    """Numbers are below this."""
    end: int
    """Put after each document."""

    def encode(self, texts: list[str]) -> Encoded: ...

    def decode(self, tokens: list[int]) -> str: ...

    def number(self, token: str) -> int | None:
        """Of a token by its text, such as [MASK]; None where there is no such token."""


class Bytes:
    """The 256 bytes of UTF-8, and 256 for the end of a document."""

    vocab = 257
    end = 256

    def encode(self, texts: list[str]) -> Encoded:
        data = [text.encode() for text in texts]
        tokens = np.frombuffer(b"".join(data), np.uint8).astype(np.int32)
        return tokens, np.fromiter(map(len, data), np.int64, len(data))

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def number(self, token: str) -> int | None:
        return token.encode()[0] if len(token.encode()) == 1 else None


class FastTokenizer:
    """Anything the tokenizers library reads. Where words are GPT-2's, they are looked up instead."""

    def __init__(self, tokenizer: Fast, end: str | None, where: str) -> None:
        self.tokenizer = tokenizer
        self.vocab = tokenizer.get_vocab_size(with_added_tokens=True)
        choices = [end] if end else list(ENDS)
        found = [number for token in choices if (number := tokenizer.token_to_id(token)) is not None]
        if not found:
            wanted = end or "any usual end-of-text token"
            raise UserError(f"{where}: has no {wanted}; name the one to use with data.end_of_text (--end-of-text)")
        self.end = found[0]
        self.words = Words(tokenizer) if _is_gpt2(tokenizer) else None

    def encode(self, texts: list[str]) -> Encoded:
        if self.words:
            return self.words.encode(texts)
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [each.ids for each in encoded]
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter((token for row in ids for token in row), np.int32, int(counts.sum())), counts

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def number(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)


def _is_gpt2(tokenizer: Fast) -> bool:
    """Byte-level BPE by GPT-2's pattern alone: nothing is normalised, and no added token is looked for in the text."""
    split: Any = tokenizer.pre_tokenizer
    model: Any = tokenizer.model
    return (
        isinstance(model, models.BPE)
        and isinstance(split, pre_tokenizers.ByteLevel)
        and split.use_regex
        and not split.add_prefix_space
        and tokenizer.normalizer is None
        and not tokenizer.get_added_tokens_decoder()
        and not (model.dropout or model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix)
    )


class Pieces:
    """A SentencePiece model."""

    def __init__(self, path: Path, end: str | None) -> None:
        import sentencepiece

        try:
            self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except Exception as error:  # plain RuntimeError, OSError or TypeError, by version
            raise UserError(f"{path}: not a SentencePiece model: {one_line(error)}") from None
        self.vocab = self.model.vocab_size()
        self.end = self.model.piece_to_id(end) if end else self.model.eos_id()
        if self.end < 0 or (end and self.model.id_to_piece(self.end) != end):
            raise UserError(f"{path}: has no {end or 'end of sentence'}; name the token to use with --end-of-text")

    def encode(self, texts: list[str]) -> Encoded:
        rows = self.model.encode(texts, num_threads=1)
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.fromiter((token for row in rows for token in row), np.int32, int(counts.sum())), counts

    def decode(self, tokens: list[int]) -> str:
        text: str = self.model.decode(tokens)
        return text

    def number(self, token: str) -> int | None:
        number: int = self.model.piece_to_id(token)
        return number if self.model.id_to_piece(number) == token else None


def open_tokenizer(spec: Spec) -> Tokenizer:
    if spec.name == "bytes":
        return Bytes()
    if spec.name == "gpt2":
        return _gpt2(spec)
    if spec.name == "wordpiece":
        return _wordpiece(spec)
    path = _existing(spec.name, "tokenizer")
    if path.is_dir():
        names = [path / name for name in ("tokenizer.json", "tokenizer.model", "spiece.model")]
        path = next((name for name in names if name.exists()), names[0])
    if path.suffix == ".model":
        return Pieces(path, spec.end)
    try:
        fast = Fast.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for a bad file
        raise UserError(f"{path}: not a tokenizer.json: {error}") from None
    return FastTokenizer(fast, spec.end, str(path))


def _gpt2(spec: Spec) -> Tokenizer:
    vocab, merges = _existing(spec.vocab_file, "vocab_file"), _existing(spec.merges_file, "merges_file")
    try:
        fast = Fast(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises plain Exception for a bad file
        raise UserError(f"{vocab}, {merges}: not GPT-2 files: {error}") from None
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return FastTokenizer(fast, spec.end, str(vocab))


def _wordpiece(spec: Spec) -> Tokenizer:
    vocab = _existing(spec.vocab_file, "vocab_file")
    try:
        fast = Fast(models.WordPiece.from_file(str(vocab), unk_token="[UNK]"))
    except Exception as error:  # the library raises plain Exception for a bad file
        raise UserError(f"{vocab}: not a WordPiece vocabulary, a token on each line: {error}") from None
    fast.normalizer = normalizers.BertNormalizer(lowercase=spec.lowercase)
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"):
        if fast.token_to_id(token) is None:
            raise UserError(f"{vocab}: has no {token}, so it is not a BERT vocabulary")
    return FastTokenizer(fast, spec.end, str(vocab))


def _existing(path: str | None, key: str) -> Path:
    found = Path(path or "").expanduser()
    if not path or not found.exists():
        flag = key.replace("_", "-").replace("merges", "merge")
        raise UserError(f"data.{key}={path}: no such file; give one (--{flag}), or data.tokenizer=bytes")
    return found

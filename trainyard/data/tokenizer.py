"""From text to token numbers: bytes, a Hugging Face tokenizer.json, or GPT-2's vocab and merges."""

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers

from trainyard.config.schema import DataSection
from trainyard.errors import UserError

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<｜end▁of▁sentence｜>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    vocab: int
    """Numbers are below this."""
    end: int
    """Put after each document."""

    def encode(self, documents: list[str]) -> list[NDArray[np.int32]]: ...

    def decode(self, tokens: list[int]) -> str: ...


class Bytes:
    """The 256 bytes of UTF-8, and 256 for the end of a document."""

    vocab = 257
    end = 256

    def encode(self, documents: list[str]) -> list[NDArray[np.int32]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in documents]

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class FastTokenizer:
    """Anything the tokenizers library reads."""

    def __init__(self, tokenizer: Fast, end: str | None, where: str) -> None:
        self.tokenizer = tokenizer
        self.vocab = tokenizer.get_vocab_size(with_added_tokens=True)
        choices = [end] if end else list(ENDS)
        found = [number for token in choices if (number := tokenizer.token_to_id(token)) is not None]
        if not found:
            wanted = end or "any usual end-of-text token"
            raise UserError(f"{where}: has no {wanted}; name the one to use with data.end_of_text")
        self.end = found[0]

    def encode(self, documents: list[str]) -> list[NDArray[np.int32]]:
        encoded = self.tokenizer.encode_batch(documents, add_special_tokens=False)
        return [np.asarray(each.ids, dtype=np.int32) for each in encoded]

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)


def load_tokenizer(data: DataSection) -> Tokenizer:
    if data.tokenizer == "bytes":
        return Bytes()
    if data.tokenizer == "gpt2":
        vocab, merges = (
            _existing(path, key) for path, key in ((data.vocab_file, "vocab_file"), (data.merges_file, "merges_file"))
        )
        try:
            fast = Fast(models.BPE.from_file(str(vocab), str(merges)))
        except Exception as error:  # the library raises plain Exception for a bad file
            raise UserError(f"data.vocab_file={vocab}, data.merges_file={merges}: not GPT-2 files: {error}") from None
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        return FastTokenizer(fast, data.end_of_text, str(vocab))
    path = _existing(data.tokenizer, "tokenizer")
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        fast = Fast.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for a bad file
        raise UserError(f"data.tokenizer={path}: not a tokenizer.json: {error}") from None
    return FastTokenizer(fast, data.end_of_text, str(path))


def _existing(path: str | None, key: str) -> Path:
    found = Path(path or "").expanduser()
    if not path or not found.exists():
        raise UserError(f"data.{key}={path}: no such file; give one, or data.tokenizer=bytes")
    return found

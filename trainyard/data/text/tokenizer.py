"""Tokenizers: bytes, GPT-2's vocab and merges, tokenizer.json, SentencePiece, WordPiece.

At the end: their files for transformers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers

from trainyard.core.errors import UserError, one_line
from trainyard.remote.local_copies import local_inputs, local_tokenizer
from trainyard.remote.model_files import MODEL_FILES

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<｜end▁of▁sentence｜>", "<eos>", "[SEP]")
"""Usual end-of-text tokens, in order of preference."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model")
"""Files that hold the tokenizer of a directory, in order of preference."""
NAMED_TOKENIZERS = ("", "bytes", "gpt2", "wordpiece")
"""Names that are not paths."""
UNKNOWN_TOKEN = "[UNK]"
BERT_TOKENS = ("[PAD]", UNKNOWN_TOKEN, "[CLS]", "[SEP]", "[MASK]")
"""The special tokens of a BERT vocabulary."""

EncodedTexts = tuple[NDArray[np.int32], NDArray[np.int64]]
"""Token ids of some texts, one after the other, and the number of tokens of each text."""


class TokenizerSpec(NamedTuple):
    """A tokenizer by name and files, or by path."""

    name: str
    """bytes, gpt2, wordpiece, or a tokenizer.json, a SentencePiece model, or a directory with one: a path, a URL, or a
    name on the Hub."""
    vocab_file: str | None = None
    """vocab.json for gpt2, vocab.txt for wordpiece."""
    merges_file: str | None = None
    end_token: str | None = None
    """Token after each document; default: the tokenizer's own."""
    lowercase: bool = True
    """Lowercase the text and strip accents; wordpiece only."""
    new_tokens: tuple[str, ...] = ()
    """Special tokens to add, which take the ids after those of the tokenizer."""


class Tokenizer(Protocol):
    vocab_size: int
    """All token ids are below this."""
    end_id: int | None
    """Token id that ends a document; None if the vocabulary has none that is known."""
    special_ids: frozenset[int]
    """Token ids that stand for no text, such as the ones that begin and end a document."""

    @property
    def max_token_length(self) -> int:
        """No token stands for more characters than this."""

    def encode(self, texts: list[str]) -> EncodedTexts: ...

    def decode(self, tokens: list[int]) -> str: ...

    def token_id(self, token: str) -> int | None:
        """The id of a token such as [MASK]; None if the vocabulary has no such token."""


class ByteTokenizer:
    """The 256 bytes of UTF-8; id 256 ends a document."""

    vocab_size = 257
    end_id: int | None = 256
    special_ids = frozenset((256,))
    max_token_length = 1

    def encode(self, texts: list[str]) -> EncodedTexts:
        data = [text.encode() for text in texts]
        tokens = np.frombuffer(b"".join(data), np.uint8).astype(np.int32)
        return tokens, np.fromiter(map(len, data), np.int64, len(data))

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        return token.encode()[0] if len(token.encode()) == 1 else None


class FastTokenizer:
    """Any tokenizer of the tokenizers library. Plain GPT-2 tokenizers use the faster encoder of this package."""

    def __init__(self, tokenizer: Fast, end_token: str | None, source: str) -> None:
        """`source` names the file in error messages."""
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        candidates = [end_token] if end_token else list(END_TOKENS)
        end_ids = [number for token in candidates if (number := tokenizer.token_to_id(token)) is not None]
        if end_token and not end_ids:
            raise UserError(f"{source}: has no {end_token}; set data.end_of_text (--end-of-text) to the one to use")
        self.end_id = end_ids[0] if end_ids else None
        added = tokenizer.get_added_tokens_decoder().items()
        self.special_ids = frozenset((*end_ids[:1], *(number for number, token in added if token.special)))
        self.gpt2_encoder = None
        if _is_plain_gpt2(tokenizer):
            from trainyard.data.text.gpt2_fast_bpe import FastGpt2Encoder  # imports pyarrow

            self.gpt2_encoder = FastGpt2Encoder(tokenizer, byte_to_char())

    @property
    def max_token_length(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()))  # in bytes, if a character of the vocabulary is one

    def encode(self, texts: list[str]) -> EncodedTexts:
        if self.gpt2_encoder:
            return self.gpt2_encoder.encode(texts)
        return _concatenate([text.ids for text in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)])

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)


def _is_plain_gpt2(tokenizer: Fast) -> bool:
    """True for byte-level BPE with GPT-2's pattern, no normalization and no added tokens to find in the text."""
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


class SentencePieceTokenizer:
    def __init__(self, path: Path, end_token: str | None) -> None:
        import sentencepiece

        with _report_invalid(f"{path}: not a SentencePiece model"):
            self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.vocab_size = self.model.vocab_size()
        end_id: int = self.model.eos_id()
        self.end_id = self.token_id(end_token) if end_token else end_id if end_id >= 0 else None
        if end_token and self.end_id is None:
            raise UserError(f"{path}: has no {end_token}; set --end-of-text to one it has")
        ends = () if self.end_id is None else (self.end_id,)
        self.special_ids = frozenset((*ends, *filter(self.model.is_control, range(self.vocab_size))))

    @property
    def max_token_length(self) -> int:
        return max(map(len, map(self.model.id_to_piece, range(self.vocab_size))))

    def encode(self, texts: list[str]) -> EncodedTexts:
        return _concatenate(self.model.encode(texts, num_threads=1))

    def decode(self, tokens: list[int]) -> str:
        text: str = self.model.decode(tokens)
        return text

    def token_id(self, token: str) -> int | None:
        number: int = self.model.piece_to_id(token)
        return number if self.model.id_to_piece(number) == token else None


def document_end_id(tokenizer: Tokenizer) -> int:
    """The token after each document. Raises UserError if the tokenizer has none that is known."""
    if tokenizer.end_id is None:
        raise UserError(
            f"the tokenizer has none of the usual end-of-text tokens ({', '.join(END_TOKENS[:3])}, ...); set "
            "data.end_of_text (--end-of-text) to the one to use"
        )
    return tokenizer.end_id


def _concatenate(texts: list[list[int]]) -> EncodedTexts:
    counts = np.fromiter(map(len, texts), np.int64, len(texts))
    return np.fromiter((token for text in texts for token in text), np.int32, int(counts.sum())), counts


def localize(spec: TokenizerSpec) -> TokenizerSpec:
    """The tokenizer with local paths: what is on the Hub or at a URL is downloaded into a cache."""
    name = spec.name
    if name not in NAMED_TOKENIZERS:
        name = str(local_tokenizer(name))
        if name in NAMED_TOKENIZERS:  # pathlib drops the "./" that tells a directory from a name
            name = f"./{name}"
    vocab, merges = (path and local_inputs([path])[0] for path in (spec.vocab_file, spec.merges_file))
    return spec._replace(name=name, vocab_file=vocab, merges_file=merges)


def load_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    spec = localize(spec)
    if not spec.new_tokens:
        return _load(spec)
    loaded = _load(spec._replace(new_tokens=()))
    if isinstance(loaded, SentencePieceTokenizer):
        raise UserError(f"model.new_tokens: {spec.name} cannot be extended; nearest: its tokenizer.json")
    fast = loaded.tokenizer if isinstance(loaded, FastTokenizer) else byte_tokenizer()
    fast.add_special_tokens(list(spec.new_tokens))
    return FastTokenizer(fast, spec.end_token, spec.name)


def _load(spec: TokenizerSpec) -> Tokenizer:
    if spec.name == "bytes":
        return ByteTokenizer()
    if spec.name == "gpt2":
        return _load_gpt2(spec)
    if spec.name == "wordpiece":
        return _load_wordpiece(spec)
    path = _require_path(spec.name, "tokenizer")
    if path.is_dir():
        files = [path / name for name in TOKENIZER_FILES]
        path = next((file for file in files if file.exists()), files[0])
    if path.suffix == ".model":
        return SentencePieceTokenizer(path, spec.end_token)
    with _report_invalid(f"{path}: not a tokenizer.json"):
        fast = Fast.from_file(str(path))
    return FastTokenizer(fast, spec.end_token, str(path))


@contextmanager
def _report_invalid(problem: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the libraries raise plain Exception and others, depending on the version
        raise UserError(f"{problem}: {one_line(error)}") from None


def _load_gpt2(spec: TokenizerSpec) -> Tokenizer:
    vocab, merges = _require_path(spec.vocab_file, "vocab_file"), _require_path(spec.merges_file, "merges_file")
    with _report_invalid(f"{vocab}, {merges}: not GPT-2 files"):
        fast = byte_level(models.BPE.from_file(str(vocab), str(merges)))
    return FastTokenizer(fast, spec.end_token, str(vocab))


def _load_wordpiece(spec: TokenizerSpec) -> Tokenizer:
    vocab = _require_path(spec.vocab_file, "vocab_file")
    with _report_invalid(f"{vocab}: not a WordPiece vocabulary with one token per line"):
        fast = wordpiece(models.WordPiece.from_file(str(vocab), unk_token=UNKNOWN_TOKEN), spec.lowercase)
    for token in BERT_TOKENS:
        if fast.token_to_id(token) is None:
            raise UserError(f"{vocab}: has no {token}, so it is not a BERT vocabulary")
    return FastTokenizer(fast, spec.end_token, str(vocab))


def byte_level(model: models.BPE, use_regex: bool = True) -> Fast:
    """A BPE of bytes inside the words of GPT-2's pattern; without `use_regex`, a text is one word."""
    fast = Fast(model)
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    fast.decoder = decoders.ByteLevel()
    return fast


def wordpiece(model: models.WordPiece, lowercase: bool) -> Fast:
    """A WordPiece tokenizer with BERT's normalization and words."""
    fast = Fast(model)
    fast.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    return fast


def _require_path(name: str | None, key: str) -> Path:
    path = Path(name or "").expanduser()
    if not name or not path.exists():
        flag = key.replace("_", "-").replace("merges", "merge")
        raise UserError(f"data.{key}={name}: no such file; set it (--{flag}), or use data.tokenizer=bytes")
    return path


def hf_tokenizer_files(spec: TokenizerSpec) -> dict[str, bytes]:
    """Contents by file name. A SentencePiece model has no such files: transformers reads the model itself."""
    tokenizer = load_tokenizer(spec)
    if isinstance(tokenizer, FastTokenizer):
        fast = tokenizer.tokenizer
    elif isinstance(tokenizer, ByteTokenizer):
        fast = byte_tokenizer()
    else:
        return {}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    generation: dict[str, Any] = {}
    if tokenizer.end_id is not None:
        config["eos_token"], generation["eos_token_id"] = fast.id_to_token(tokenizer.end_id), tokenizer.end_id
    configs = {"tokenizer_config.json": config, "generation_config.json": generation}
    files = {name: (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode() for name, data in configs.items()}
    return {"tokenizer.json": fast.to_str(pretty=True).encode(), **files}


def add_new_tokens(files: Mapping[str, bytes], new_tokens: Sequence[str]) -> dict[str, bytes]:
    """The files of a model, with special tokens added to its tokenizer.json and tokenizer_config.json."""
    if not new_tokens or "tokenizer.json" not in files:
        return dict(files)
    fast = Fast.from_buffer(files["tokenizer.json"])
    fast.add_special_tokens(list(new_tokens))
    changed = {"tokenizer.json": fast.to_str(pretty=True).encode()}
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    if "added_tokens_decoder" in config:  # transformers 4 lists all added tokens here too
        added = fast.get_added_tokens_decoder()
        fields = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        config["added_tokens_decoder"] = {
            str(number): {field: getattr(added[number], field) for field in fields} for number in sorted(added)
        }
        changed["tokenizer_config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return {**files, **changed}


def model_tokenizer_files(spec: TokenizerSpec) -> dict[str, bytes]:
    """The files next to the tokenizer, such as its chat template, and those that are missing there."""
    files = hf_tokenizer_files(spec)
    path = local_tokenizer(spec.name)
    if path.is_file() and path.name in ("tokenizer.json", "tokenizer.model"):
        path = path.parent
    try:
        paths = [
            each
            for each in (path.iterdir() if path.is_dir() else ())
            if MODEL_FILES.fullmatch(each.name) and each.is_file()
        ]
        return files | {each.name: each.read_bytes() for each in sorted(paths)}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {one_line(error)}") from None


def read_json(model_files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """One of the files of a checkpoint; empty if there is none."""
    try:
        content = json.loads(model_files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not valid JSON: {one_line(error)}") from None
    return content if isinstance(content, dict) else {}


def byte_to_char() -> dict[int, str]:
    """The printable character that stands for each byte in GPT-2's vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + number) for number, byte in enumerate(rest)}


def byte_tokenizer() -> Fast:
    """A byte-level BPE without merges, whose ids are the bytes, and then the token that ends a document."""
    characters = bytes(range(256)).decode("latin-1").translate(byte_to_char())
    fast = byte_level(models.BPE({character: byte for byte, character in enumerate(characters)}, []), use_regex=False)
    fast.add_special_tokens(["<|endoftext|>"])
    return fast

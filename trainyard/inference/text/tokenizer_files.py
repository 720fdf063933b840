"""The tokenizer that comes with a checkpoint."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainyard.core.errors import UserError
from trainyard.data.text.tokenizer import TOKENIZER_FILES, Tokenizer, TokenizerSpec, load_tokenizer, read_json
from trainyard.models import ModelConfig


@contextmanager
def tokenizer_directory(model_files: Mapping[str, bytes]) -> Iterator[Path | None]:
    """A directory with the files of a checkpoint's tokenizer, for libraries that read files; None if there are none."""
    has_vocab = "vocab.txt" in model_files or {"vocab.json", "merges.txt"} <= set(model_files)
    if not has_vocab and not any(name in model_files for name in TOKENIZER_FILES):
        yield None
        return
    with TemporaryDirectory(prefix="trainyard-") as directory:
        for name, content in model_files.items():
            (Path(directory) / name).write_bytes(content)
        yield Path(directory)


def load_model_tokenizer(model_files: Mapping[str, bytes], end_token: str | None = None) -> Tokenizer | None:
    """The tokenizer among the files of a checkpoint, by name; None if there is none. `end_token` ends a document; by
    default it is the one that tokenizer_config.json names."""
    with tokenizer_directory(model_files) as directory:
        if directory is None:
            return None
        end_token = end_token or _end_token(model_files)
        if any(name in model_files for name in TOKENIZER_FILES):
            return load_tokenizer(TokenizerSpec(str(directory), end_token=end_token))
        if "vocab.txt" in model_files:
            return load_tokenizer(TokenizerSpec("wordpiece", str(directory / "vocab.txt"), end_token=end_token))
        files = (str(directory / "vocab.json"), str(directory / "merges.txt"))
        return load_tokenizer(TokenizerSpec("gpt2", *files, end_token))


def find_tokenizer(name: str | None, model_files: Mapping[str, bytes]) -> Tokenizer | None:
    """The tokenizer that the user names, or else that of a checkpoint."""
    return load_tokenizer(TokenizerSpec(name)) if name else load_model_tokenizer(model_files)


def model_end_ids(model_files: Mapping[str, bytes], model: ModelConfig) -> tuple[int, ...]:
    """The tokens that end a text: eos_token_id of generation_config.json, or else of the model; empty without any."""
    ids: Any = read_json(model_files, "generation_config.json").get("eos_token_id")
    ids = model.eos_token_id if ids is None else ids
    ids = [] if ids is None else list(ids) if isinstance(ids, list | tuple) else [ids]
    if not all(type(number) is int for number in ids):
        raise UserError(f"generation_config.json: eos_token_id is {ids!r}, not a token id or a list of them")
    return tuple(ids)


def _end_token(model_files: Mapping[str, bytes]) -> str | None:
    """The eos_token of tokenizer_config.json."""
    try:
        token = json.loads(model_files.get("tokenizer_config.json", b"{}")).get("eos_token")
    except (ValueError, AttributeError, RecursionError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None

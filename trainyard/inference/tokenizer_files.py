"""The tokenizer that comes with a checkpoint."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from trainyard.data.text.tokenizer import TOKENIZER_FILES, Tokenizer, TokenizerSpec, load_tokenizer


def find_tokenizer(name: str | None, model_files: dict[str, bytes]) -> Tokenizer | None:
    """The tokenizer at `name`, or the one among the checkpoint's files."""
    if name:
        return load_tokenizer(TokenizerSpec(name))
    if not any(file in model_files for file in TOKENIZER_FILES):
        if "vocab.txt" in model_files:
            return _load_from_files("wordpiece", model_files, vocab_file="vocab.txt")
        if {"vocab.json", "merges.txt"} <= set(model_files):
            return _load_from_files("gpt2", model_files, vocab_file="vocab.json", merges_file="merges.txt")
        return None
    return _load_from_files(None, model_files)


def _load_from_files(name: str | None, model_files: dict[str, bytes], **paths: str) -> Tokenizer:
    end_token = _end_token(model_files)
    with TemporaryDirectory() as directory:  # the libraries read files
        for file, content in model_files.items():
            (Path(directory) / file).write_bytes(content)
        spec = TokenizerSpec(name or directory, end_token=end_token)
        return load_tokenizer(spec._replace(**{key: str(Path(directory) / file) for key, file in paths.items()}))


def _end_token(model_files: dict[str, bytes]) -> str | None:
    """The end-of-text token that tokenizer_config.json names."""
    try:
        token = json.loads(model_files.get("tokenizer_config.json", b"{}")).get("eos_token")
    except (ValueError, AttributeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None

"""The tokenizer that comes with a checkpoint."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from trainyard.data.text.tokenizer import TOKENIZER_FILES, Tokenizer, TokenizerSpec, load_tokenizer


def find_tokenizer(name: str | None, model_files: dict[str, bytes]) -> Tokenizer | None:
    """The tokenizer at `name`, or the one among the checkpoint's files."""
    if name:
        return load_tokenizer(TokenizerSpec(name))
    if not model_files:
        return None
    with TemporaryDirectory() as directory:  # the libraries read files
        for file, content in model_files.items():
            (Path(directory) / file).write_bytes(content)
        end_token, vocab, merges = (
            _end_token(model_files),
            Path(directory) / "vocab",
            str(Path(directory) / "merges.txt"),
        )
        if any(file in model_files for file in TOKENIZER_FILES):
            return load_tokenizer(TokenizerSpec(directory, end_token=end_token))
        if "vocab.txt" in model_files:
            return load_tokenizer(TokenizerSpec("wordpiece", f"{vocab}.txt", end_token=end_token))
        if {"vocab.json", "merges.txt"} <= set(model_files):
            return load_tokenizer(TokenizerSpec("gpt2", f"{vocab}.json", merges, end_token))
    return None


def _end_token(model_files: dict[str, bytes]) -> str | None:
    """The end-of-text token that tokenizer_config.json names."""
    try:
        token = json.loads(model_files.get("tokenizer_config.json", b"{}")).get("eos_token")
    except (ValueError, AttributeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None

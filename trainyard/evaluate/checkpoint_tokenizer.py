"""The tokenizer of a checkpoint, from the files that are stored with it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from trainyard.checkpoint.formats.tensor_map import WeightSource
from trainyard.checkpoint.registry import read_model_files
from trainyard.config.schema import Config
from trainyard.data.loading.build import tokenizer_spec
from trainyard.data.text.tokenizer import TOKENIZER_FILES, Tokenizer, TokenizerSpec, load_tokenizer


@contextmanager
def tokenizer_directory(weights: WeightSource, source: str | Path) -> Iterator[Path | None]:
    """A directory with the tokenizer files of the checkpoint `weights` at `source`; None if it has none."""
    files = read_model_files(weights, source)
    if not any(name in files for name in TOKENIZER_FILES):
        yield None
        return
    with TemporaryDirectory(prefix="trainyard-") as temporary:
        for name, content in files.items():
            (Path(temporary) / name).write_bytes(content)
        yield Path(temporary)


def load_evaluation_tokenizer(
    config: Config, weights: WeightSource, source: str | Path, tokenizer: str | None
) -> Tokenizer | None:
    """The tokenizer named by the user (a TokenizerSpec name), else that of the checkpoint; None if there is neither."""
    if tokenizer:
        return load_tokenizer(tokenizer_spec(config)._replace(name=tokenizer))
    with tokenizer_directory(weights, source) as directory:
        if directory is None:
            return None
        return load_tokenizer(TokenizerSpec(str(directory), end_token=config.data.end_of_text or _end_token(directory)))


def _end_token(directory: Path) -> str | None:
    """The eos_token of tokenizer_config.json."""
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        token = json.loads(path.read_bytes()).get("eos_token")
    except (ValueError, AttributeError, RecursionError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None

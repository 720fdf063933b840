"""Which files of a repository or directory a command needs: weights in one format, the tokenizer, config.json."""

import json
import re
from collections.abc import Callable, Sequence
from enum import Enum

from trainyard.core.errors import UserError
from trainyard.remote.location import is_name_below

MODEL_FILES = re.compile(
    r"(tokenizer.*\.(json|model)|spiece\.model|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|generation_config\.json|chat_template.*)"
)
"""Names of files that belong to the model whatever the format of its weights."""
USUAL_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "vocab.txt", "generation_config.json", "chat_template.jinja"),
)
"""Those to ask a web server for, which lists no directories."""
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Weights of a Hugging Face directory, in order of preference: pickles only where there is nothing else."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""A PEFT adapter, which names the model that it belongs to."""
INDEX_SUFFIX = ".index.json"


class Wanted(Enum):
    CONFIG = "config.json"
    TOKENIZER = "tokenizer"
    WEIGHTS = "weights"


def needed_files(wanted: Wanted, names: Sequence[str], read: Callable[[str], bytes], label: str) -> list[str]:
    """The names that are wanted among those of a directory. `read` returns the content of one (an index of weights)."""
    present = {name for name in names if "/" not in name}
    if wanted is Wanted.CONFIG:
        return _require(present, "config.json", label)
    tokenizer = sorted(name for name in present if MODEL_FILES.fullmatch(name))
    if wanted is Wanted.TOKENIZER:
        if not any(name.startswith(("tokenizer", "spiece", "vocab")) for name in tokenizer):
            raise UserError(f"{label}: has no tokenizer; has: {_listed(names)}")
        return tokenizer
    weights = weight_files(present, read, label)
    if not weights and present.issuperset(ADAPTER_FILES):
        return sorted({*ADAPTER_FILES, *tokenizer})
    if not weights:
        raise UserError(f"{label}: has neither {' nor '.join(WEIGHT_FILES)}; has: {_listed(names)}")
    return sorted({*_require(present, "config.json", label), *tokenizer, *weights})


def weight_files(present: set[str], read: Callable[[str], bytes], label: str) -> list[str]:
    """The weights among the files of a directory: one file, or an index and the files it names."""
    for name in WEIGHT_FILES:
        index = name + INDEX_SUFFIX
        if index in present:
            shards = read_index(read(index), f"{label}/{index}")
            if missing := shards - present:
                raise UserError(f"{label}: has no {min(missing)}, although {index} names it")
            return [index, *sorted(shards)]
        if name in present:
            return [name]
    return []


def read_index(content: bytes, label: str) -> set[str]:
    """The files that an index of weights names, which must be in the same directory."""
    try:
        shards = {str(name) for name in json.loads(content)["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{label}: not an index of weights") from None
    if outside := [name for name in shards if "/" in name or not is_name_below(name)]:
        raise UserError(f"{label}: names {outside[0]}, which is not a file in the same directory")
    return shards


def _require(present: set[str], name: str, label: str) -> list[str]:
    if name not in present:
        raise UserError(f"{label}: has no {name}; has: {_listed(sorted(present))}")
    return [name]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(list(names)[:8]) or "nothing"
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")

"""What Megatron-LM's flags and NxDT's keys for Megatron models and data have in common.

Errors name a key or flag as its own system spells it.
"""

from collections.abc import Mapping

from trainyard.core.errors import UserError
from trainyard.core.yaml_io import format_value
from trainyard.importers.key_table import ConfigKeys, parse_blend
from trainyard.importers.known_models import GPT2_VOCAB, vocab_size_from_file

GPT2_TOKENIZER = "GPT2BPETokenizer"


def check_family(family: str, chosen_by: str, found: Mapping[str, object], required: Mapping[str, object]) -> None:
    """Raise a UserError if a key has another value than the model family requires."""
    for name, value in found.items():
        if value != required[name]:
            raise UserError(
                f"{name}={format_value(value)}: not supported {chosen_by} (family {family}); "
                f"nearest: {format_value(required[name])}"
            )


def vocab_size(files: list[str | None], tokenizer: str | None) -> int | None:
    """Return the vocabulary size of the first existing file, otherwise that of GPT-2 if it is the tokenizer."""
    sizes = (vocab_size_from_file(file) for file in files if file)
    return next((size for size in sizes if size), GPT2_VOCAB if tokenizer == GPT2_TOKENIZER else None)


def token_data(
    key: str, blend: object, order: str, cyclic: bool, split: str | None, resets: Mapping[str, bool]
) -> ConfigKeys:
    """Return our keys for .bin and .idx files.

    `blend` is the value of `key`; `order` the sample order of that system (data.order); `resets` says whether positions
    and masks restart in each document.
    """
    if len(set(resets.values())) > 1:
        raise UserError(f"{' and '.join(resets)}: supported only together (data.document_mask); nearest: both")
    paths, weights = parse_blend(blend, key)
    return {
        "data.source": "tokens",
        "data.paths": paths,
        "data.weights": weights,
        "data.order": "shuffled" if cyclic or (len(paths) > 1 and not weights) else order,
        "data.split": split,
        "data.document_mask": all(resets.values()),
    }


def gpt2_tokenizer(vocab_file: str | None, merges_file: str | None) -> ConfigKeys:
    """Return our keys for the GPT-2 tokenizer; none unless both files are given."""
    files = {"data.vocab_file": vocab_file, "data.merges_file": merges_file}
    return {"data.tokenizer": "gpt2", **files} if vocab_file and merges_file else {}

"""Published model sizes, for configurations that leave them to a missing config.json or tokenizer.

A model is only inferred if the given sizes match exactly one published model, and the import always warns about it.
"""

import json
from collections.abc import Mapping
from math import log2
from typing import Any, NamedTuple

from trainyard.core.errors import UserError
from trainyard.importers.key_table import find_path

GPT2_TOKENIZER, GPT2_VOCAB = "GPT2BPETokenizer", 50257
LLAMA3_ROPE_SCALING = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_positions": 8192,
}


class KnownModel(NamedTuple):
    """A published Llama-like model."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    rope_theta: float
    max_positions: int
    rope_scaling: dict[str, Any] | None = None
    experts: int | None = None

    def model_section(self) -> dict[str, Any]:
        """Return the model section of our configuration."""
        sizes = {name: value for name, value in self._asdict().items() if name not in ("name", "experts")}
        family = {"family": "mixtral", "experts": self.experts} if self.experts else {"family": "llama"}
        return {**family, **sizes, "norm_eps": 1e-5, "init_std": 0.02}


KNOWN_MODELS = (
    KnownModel("Llama 2 7B", 4096, 32, 32, 32, 11008, 32000, 1e4, 4096),
    KnownModel("Llama 2 13B", 5120, 40, 40, 40, 13824, 32000, 1e4, 4096),
    KnownModel("Llama 2 70B", 8192, 80, 64, 8, 28672, 32000, 1e4, 4096),
    KnownModel("Mistral 7B", 4096, 32, 32, 8, 14336, 32000, 1e4, 32768),
    KnownModel("Llama 3 8B", 4096, 32, 32, 8, 14336, 128256, 5e5, 8192),
    KnownModel("Llama 3 70B", 8192, 80, 64, 8, 28672, 128256, 5e5, 8192),
    KnownModel("Llama 3.1 8B", 4096, 32, 32, 8, 14336, 128256, 5e5, 131072, LLAMA3_ROPE_SCALING),
    KnownModel("Llama 3.1 70B", 8192, 80, 64, 8, 28672, 128256, 5e5, 131072, LLAMA3_ROPE_SCALING),
    KnownModel("Llama 3.1 405B", 16384, 126, 128, 8, 53248, 128256, 5e5, 131072, LLAMA3_ROPE_SCALING),
    KnownModel("Mixtral 8x7B", 4096, 32, 32, 8, 14336, 32000, 1e6, 32768, experts=8),
    KnownModel("Mixtral 8x22B", 6144, 56, 48, 8, 16384, 32000, 1e6, 65536, experts=8),
)


def find_known_model(model: Mapping[str, Any]) -> KnownModel | None:
    """Return the published model that the given keys of our model section match.

    Fewer layers than published also match: examples often train a shortened model.
    """
    exact = ("hidden", "heads", "kv_heads", "ffn", "rope_theta")
    matches = [
        known
        for known in KNOWN_MODELS
        if model.get("hidden")
        and known.experts == model.get("experts")
        and all(getattr(known, name) == model[name] for name in exact if model.get(name) is not None)
        and 1 <= model.get("layers", known.layers) <= known.layers
    ]

    def distance(known: KnownModel) -> tuple[bool, float]:
        max_positions = max(model.get("max_positions") or known.max_positions, 1)
        return model.get("layers", known.layers) != known.layers, abs(log2(known.max_positions / max_positions))

    return min(matches, key=distance, default=None)


def vocab_size(files: list[str | None], tokenizer: str | None) -> int | None:
    """Return the vocabulary size of the first existing file, otherwise that of GPT-2 if it is the tokenizer."""
    sizes = (vocab_size_from_file(file) for file in files if file)
    return next((size for size in sizes if size), GPT2_VOCAB if tokenizer == GPT2_TOKENIZER else None)


def vocab_size_from_file(path: str) -> int | None:
    """Return the vocabulary size of a vocab.json, a tokenizer.json or its directory; None if there is no such file."""
    file = find_path(path)
    file = find_path(file / "tokenizer.json") if file and file.is_dir() else file
    if file is None or file.suffix != ".json":
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        vocab = data["model"]["vocab"] if "model" in data else data
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        added_ids = [token["id"] for token in data.get("added_tokens", [])] if "model" in data else []
        return max([*ids, *added_ids], default=-1) + 1
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        raise UserError(f"{file}: not a readable vocabulary; expected vocab.json or tokenizer.json") from None

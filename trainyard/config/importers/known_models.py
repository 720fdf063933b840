"""Published sizes, for configurations that leave them to a file which is not here: a config.json, a tokenizer.

A guess is only offered where what is said fits exactly one published model, and it is always said.
"""

import json
from collections.abc import Mapping
from math import log2
from typing import Any, NamedTuple

from trainyard.config.importers.key_table import find_path
from trainyard.core.errors import UserError

GPT2_VOCAB = 50257
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

    def model_section(self) -> dict[str, Any]:
        """Our model section."""
        sizes = {name: value for name, value in self._asdict().items() if name != "name"}
        return {"family": "llama", **sizes, "norm_eps": 1e-5, "init_std": 0.02}


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
)


def find_known_model(model: Mapping[str, Any]) -> KnownModel | None:
    """The published model that these of our keys (those that are said) fit; fewer layers are a cut-down trial of it."""
    exact = ("hidden", "heads", "kv_heads", "ffn", "rope_theta")
    fitting = [
        shape
        for shape in KNOWN_MODELS
        if model.get("hidden")
        and all(getattr(shape, name) == model[name] for name in exact if model.get(name) is not None)
        and 1 <= model.get("layers", shape.layers) <= shape.layers
    ]

    def distance(shape: KnownModel) -> tuple[bool, float]:
        wanted = max(model.get("max_positions") or shape.max_positions, 1)
        return model.get("layers", shape.layers) != shape.layers, abs(log2(shape.max_positions / wanted))

    return min(fitting, key=distance, default=None)


def vocab_size_from_file(path: str) -> int | None:
    """Words of a vocab.json, of a tokenizer.json, or of the directory of one; None where there is no such file."""
    file = find_path(path)
    file = find_path(file / "tokenizer.json") if file and file.is_dir() else file
    if file is None or file.suffix != ".json":
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        whole = data["model"]["vocab"] if "model" in data else data
        numbers = whole.values() if isinstance(whole, dict) else range(len(whole))
        added = [each["id"] for each in data.get("added_tokens", [])] if "model" in data else []
        return max([*numbers, *added], default=-1) + 1
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        raise UserError(f"{file}: not a readable vocabulary; wanted: vocab.json or tokenizer.json") from None

"""Small configurations that tests share."""

from typing import Any

import torch
from torch import Tensor, nn

from trainyard import models
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.models.init import initial_values

LLAMA = {
    "family": "llama",
    "vocab": 260,
    "hidden": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "max_positions": 64,
}
GPT = {"family": "gpt", "vocab": 260, "hidden": 32, "layers": 2, "heads": 4, "max_positions": 64}
BERT = {"family": "bert", "vocab": 128, "hidden": 32, "layers": 2, "heads": 4, "ffn": 64, "max_positions": 64}
TINY_MODELS = {"llama": LLAMA, "gpt": GPT, "bert": BERT}


def tiny_config(model: dict[str, Any] | str = "llama", **sections: dict[str, Any]) -> Config:
    model = TINY_MODELS[model] if isinstance(model, str) else model
    base: dict[str, dict[str, Any]] = {
        "model": model,
        "data": {"source": "synthetic", "seq_len": 16, "max_predictions": 4},
        "train": {"steps": 4, "global_batch": 4, "micro_batch": 2},
        "log": {"every": 1, "tensorboard": False},
        "checkpoint": {"export_hf": False},
        "device": {"name": "cpu"},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return parse(base)


def tiny_model(section: Any, seed: int = 0) -> nn.Module:
    """A model with initial weights, biases and norms moved off their constants so that every one matters."""
    blueprint = models.family_of(section).blueprint(section)
    values = initial_values(blueprint, seed)
    generator = torch.Generator().manual_seed(seed)

    def moved(name: str) -> Tensor:
        value = values(name)
        return value + 0.1 * torch.randn(value.shape, generator=generator)

    return models.fill_parameters(models.build_model(section), moved)

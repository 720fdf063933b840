"""Small configurations, models and batches that tests share."""

from typing import Any

import torch
from torch import Tensor, nn

from trainyard import models
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.constants import IGNORE_INDEX
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
MOE = {**LLAMA, "family": "mixtral", "experts": 4, "top_k": 2, "balance_loss": 0.1, "z_loss": 0.01}
"""A mixture of experts whose router losses are large enough to show."""
DEEPSEEK = {**LLAMA, "family": "deepseek_v3", "kv_heads": None, "ffn": 16, "shared_ffn": 32, "dense_ffn": 48}
DEEPSEEK |= {"dense_layers": "0", "experts": 4, "top_k": 2, "expert_groups": 2, "mtp_layers": 2, "mtp_loss": 0.5}
DEEPSEEK |= {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
"""Latent attention, a dense layer and then experts, and prediction of two further tokens with a weight that shows."""
TINY_MODELS = {"llama": LLAMA, "gpt": GPT, "bert": BERT}


def tiny_config(model: dict[str, Any] | str = "llama", **sections: dict[str, Any]) -> Config:
    """A configuration that trains in milliseconds; `sections` override its keys section by section."""
    model = TINY_MODELS[model] if isinstance(model, str) else model
    base: dict[str, dict[str, Any]] = {
        "model": model,
        "data": {"source": "synthetic", "seq_len": 16, "max_predictions": 4},
        "train": {"steps": 4, "global_batch": 4, "micro_batch": 2},
        "log": {"every": 1, "loggers": []},
        "checkpoint": {"export_hf": False},
        "device": {"name": "cpu"},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return parse(base)


def tiny_model(section: Any, seed: int = 0) -> nn.Module:
    """A model whose biases and norms are random too, so that a wrong use of any parameter shows."""
    blueprint = models.family_of(section).blueprint(section)
    values = initial_values(blueprint, seed)
    generator = torch.Generator().manual_seed(seed)

    def perturbed(name: str) -> Tensor:
        value = values(name)
        return value + 0.1 * torch.randn(value.shape, generator=generator)

    return models.fill_parameters(models.build_model(section), perturbed)


def tiny_batch(family: str, vocab: int = 97) -> dict[str, Tensor]:
    """A batch of 3 samples of 24 tokens with ignored labels and, for BERT, 6 predictions per sample and padding."""
    torch.manual_seed(2)
    tokens = torch.randint(1, vocab, (3, 24), dtype=torch.int32)  # 0 is padding in transformers' BERT
    batch = {
        "tokens": tokens,
        "sample_ids": torch.arange(3, dtype=torch.int32),
        "rng_key": torch.zeros(2, dtype=torch.int32),
    }
    if family != "bert":
        labels = torch.randint(0, vocab, (3, 24), dtype=torch.int32)
        labels[0, :5] = IGNORE_INDEX
        return batch | {"labels": labels}
    masked_positions = torch.stack([torch.randperm(20)[:6] for _ in range(3)]).int()
    labels = torch.randint(0, vocab, (3, 6), dtype=torch.int32)
    labels[1, 4:] = IGNORE_INDEX
    attention_mask = torch.ones(3, 24, dtype=torch.int32)
    attention_mask[2, 20:] = 0
    tokens[2, 20:] = 0
    return batch | {
        "masked_positions": masked_positions,
        "labels": labels,
        "attention_mask": attention_mask,
        "segment_ids": (torch.arange(24) > 10).int().expand(3, 24).contiguous(),
        "next_sentence_labels": torch.tensor([0, 1, 1]),
    }

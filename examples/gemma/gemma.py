"""Gemma as a model family from outside the package: one file with keys, modules, blueprint and Hugging Face names.

Gemma has Llama's attention. What differs: embeddings are scaled by sqrt(hidden), norms multiply by 1 + weight, the MLP
has a GELU gate, and the output projection is always tied to the embedding.

    trainyard train examples/gemma/gemma-tiny.yaml     # model.family: gemma:FAMILY
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from trainyard.families import Blueprint, Family
from trainyard.families.decoder import (
    DecoderConfig,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
)
from trainyard.families.rope import ROPE_HF_KEYS, read_rope
from trainyard.models.layers import PositionTable, RMSNorm
from trainyard.models.llama import Llama, LlamaAttention
from trainyard.models.mlp import LlamaMLP
from trainyard.models.module_factory import ModuleFactory
from trainyard.parallel.recompute import Recomputable


class GemmaConfig(DecoderConfig):
    """Gemma: Llama with scaled embeddings, norms of 1 + weight and a GELU gate."""

    tie_embeddings: Literal[True] = True
    """Gemma shares one matrix between the input embedding and the output head."""
    norm_eps: float = Field(1e-6, gt=0)
    """Epsilon added to the mean square in RMSNorm."""


class GemmaNorm(RMSNorm):
    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.kernels.add_rms_norm(x, y, 1 + self.weight, self.eps)


class GeluGate(Recomputable):
    recompute_name = "activation"

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up


class GemmaBlock(nn.Module):
    def __init__(self, c: GemmaConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.attention_norm = gemma_norm(c, make, f"{name}.attention_norm")
        self.attention = LlamaAttention(c, make, f"{name}.attention")
        self.mlp_norm = gemma_norm(c, make, f"{name}.mlp_norm")
        self.mlp = LlamaMLP(c, make, f"{name}.mlp")
        self.mlp.activation = GeluGate()

    def forward(self, x_BTD: Tensor, positions: tuple[PositionTable, ...], documents_BT: Tensor | None) -> Tensor:
        x_BTD, y_BTD = self.attention_norm(x_BTD)
        x_BTD, y_BTD = self.mlp_norm(x_BTD, self.attention(y_BTD, positions, documents_BT))
        return x_BTD + self.mlp(y_BTD)


class Gemma(Llama):
    def __init__(self, c: GemmaConfig, make: ModuleFactory) -> None:
        super().__init__(c, make)
        self.layers = make.blocks(lambda name: GemmaBlock(c, make, name))
        self.norm = gemma_norm(c, make, "norm")
        self.embedding_scale = c.hidden**0.5

    def embed(self, batch: Any, *block_inputs: Any) -> Tensor:
        x_BTD = super().embed(batch, *block_inputs)
        return x_BTD * torch.tensor(self.embedding_scale, dtype=x_BTD.dtype)


def gemma_norm(c: GemmaConfig, make: ModuleFactory, name: str) -> GemmaNorm:
    return GemmaNorm(make.parameter(f"{name}.weight"), c.norm_eps, make.kernels)


def blueprint(c: GemmaConfig) -> Blueprint:
    """Llama's parameters; norms start with weight 0."""
    table = decoder_blueprint(c)
    return replace(table, specs=tuple(replace(spec, init_value=0.0) for spec in table.specs))


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    activation = data.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise ValueError(f"hidden_activation={activation}: not supported; nearest: gelu_pytorch_tanh")
    return read_rope(data)


FAMILY = Family(
    name="gemma",
    config_class=GemmaConfig,
    module=Gemma,
    blueprint=blueprint,
    hf=decoder_hf_format(
        "gemma",
        "GemmaForCausalLM",
        keys=decoder_hf_keys(
            kv_heads=16,
            head_dim=256,
            max_positions=8192,
            rope_theta=10000.0,
            norm_eps=1e-6,
            tie_embeddings=True,
            bos_token_id=2,
            eos_token_id=1,
            pad_token_id=0,
        ),
        fixed={"attention_bias": False, "attention_dropout": 0.0},
        ignored=(*ROPE_HF_KEYS, "hidden_act", "hidden_activation"),
        read=read,
    ),
)

"""Nemotron as a model family from outside the package: one file with keys, modules, blueprint and Hugging Face names.

Nemotron has Llama's attention, with RoPE on a part of each head. What differs: LayerNorm with a bias and a factor of
1 + weight, and an MLP that has no gate and squares its ReLU.

    trainyard train examples/nemotron/nemotron-tiny.yaml     # model.family: nemotron:FAMILY
"""

from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from trainyard.families import Blueprint, Family, ParamSpec
from trainyard.families.decoder import (
    DecoderConfig,
    DecoderStyle,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
    decoder_hf_names,
)
from trainyard.families.family import HfNameMap, HfTensor
from trainyard.families.rope import read_rope
from trainyard.models.layers import LayerNorm, PositionTable
from trainyard.models.llama import Llama, LlamaAttention
from trainyard.models.module_factory import ModuleFactory
from trainyard.parallel.recompute import Recomputable


class NemotronConfig(DecoderConfig):
    """Nemotron: LayerNorm of 1 + weight, RoPE on a part of each head, an MLP of squared ReLU."""

    partial_rotary_factor: float = Field(0.5, gt=0, le=1)
    """Part of each head that RoPE rotates."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(norm="layer_bias")  # norms have a bias in the blueprint


class NemotronNorm(LayerNorm):
    def forward(self, x: Tensor, y: Tensor | None = None, *_: object) -> tuple[Tensor, Tensor]:
        return self.kernels.add_layer_norm(x, y, None, 1 + self.weight, self.bias, self.eps, None)


class NemotronMLP(Recomputable):
    recompute_name = "mlp"

    def __init__(self, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.tp = make.tp
        self.up, self.down = make.linear(f"{name}.up"), make.linear(f"{name}.down")

    def forward(self, x_BTD: Tensor) -> Tensor:
        (y_BTF,) = self.tp.column_parallel(x_BTD, self.up, keep_gathered=self.keep_gathered)
        return self.tp.reduce_output(self.down(F.relu(y_BTF).square()))


class NemotronBlock(nn.Module):
    def __init__(self, c: NemotronConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.attention_norm = norm(c, make, f"{name}.attention_norm")
        self.attention = LlamaAttention(c, make, f"{name}.attention")
        self.mlp_norm = norm(c, make, f"{name}.mlp_norm")
        self.mlp = NemotronMLP(make, f"{name}.mlp")

    def forward(self, x_BTD: Tensor, positions: tuple[PositionTable, ...], documents_BT: Tensor | None) -> Tensor:
        x_BTD, y_BTD = self.attention_norm(x_BTD)
        x_BTD, y_BTD = self.mlp_norm(x_BTD, self.attention(y_BTD, positions, documents_BT))
        return x_BTD + self.mlp(y_BTD)


class Nemotron(Llama):
    block_class = NemotronBlock

    def __init__(self, c: NemotronConfig, make: ModuleFactory) -> None:
        super().__init__(c, make)
        self.norm = norm(c, make, "norm")


def norm(c: NemotronConfig, make: ModuleFactory, name: str) -> NemotronNorm:
    return NemotronNorm(make.parameter(f"{name}.weight"), make.parameter(f"{name}.bias"), c.norm_eps, make.kernels)


def blueprint(c: NemotronConfig) -> Blueprint:
    """Llama's parameters without a gate; norms start with weight 0."""
    mlp = "layers.*.mlp."
    up = ParamSpec(f"{mlp}up.weight", (c.ffn, c.hidden), 0, init_std=c.init_std, flops_tokens="tokens")
    down = ParamSpec(f"{mlp}down.weight", (c.hidden, c.ffn), 1, init_std=c.output_init_std, flops_tokens="tokens")
    table = decoder_blueprint(c, mlp_specs=[up, down])
    return replace(table, specs=tuple(replace(spec, init_value=0.0) for spec in table.specs))


def hf_names(c: NemotronConfig) -> HfNameMap:
    mlp = "layers.*.mlp."
    return decoder_hf_names(c, {f"{mlp}{x}.weight": HfTensor(f"model.{mlp}{x}_proj.weight") for x in ("up", "down")})


FAMILY = Family(
    name="nemotron",
    config_class=NemotronConfig,
    module=Nemotron,
    blueprint=blueprint,
    hf=decoder_hf_format(
        "nemotron",
        "NemotronForCausalLM",
        keys={
            **decoder_hf_keys(kv_heads=None, max_positions=4096, rope_theta=10000.0, bos_token_id=2, eos_token_id=3),
            "norm_eps": ("norm_eps", 1e-5),
            "init_std": ("initializer_range", 0.0134),
        },
        names=hf_names,
        fixed={"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0},
        read=partial(read_rope, rotary_factor=0.5),
    ),
)

"""The block that GPT and BERT share: LayerNorm, biases everywhere, an MLP without gate."""

from collections.abc import Mapping
from typing import Any, Literal

from trainyard.families.blueprint import FusedPart, ParamSpec, column_parallel_specs
from trainyard.families.model_config import ModelConfig

Gelu = Literal["gelu", "gelu_tanh"]
GELU_FROM_HF = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
GELU_TO_HF = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def read_gelu(data: Mapping[str, Any], hf_key: str, default: str) -> dict[str, Any]:
    name = data.get(hf_key, default)
    if name not in GELU_FROM_HF:
        raise ValueError(f"{hf_key}={name}: not supported; one of {', '.join(GELU_FROM_HF)}")
    return {"activation": GELU_FROM_HF[name]}


def biased_block_specs(c: ModelConfig) -> tuple[ParamSpec, ...]:
    """The parameters of a block with LayerNorm, biases and an MLP without gate."""
    D, F, layer = c.hidden, c.ffn_size, "layers.*."
    std, out_std = c.init_std, c.output_init_std

    def qkv(kind: str) -> tuple[FusedPart, ...]:
        return tuple(FusedPart(f"{layer}attention.{name}.{kind}", D, c.heads) for name in "qkv")

    def norm(name: str) -> tuple[ParamSpec, ParamSpec]:
        return ParamSpec(f"{layer}{name}.weight", (D,), init_value=1.0), ParamSpec(f"{layer}{name}.bias", (D,))

    return (
        *norm("attention_norm"),
        *column_parallel_specs(f"{layer}attention.qkv.weight", qkv("weight"), (D,), c.fuse_qkv, std),
        *column_parallel_specs(f"{layer}attention.qkv.bias", qkv("bias"), (), c.fuse_qkv),
        ParamSpec(f"{layer}attention.output.weight", (D, D), 1, init_std=out_std, flops_tokens="tokens"),
        ParamSpec(f"{layer}attention.output.bias", (D,)),
        *norm("mlp_norm"),
        ParamSpec(f"{layer}mlp.up.weight", (F, D), 0, init_std=std, flops_tokens="tokens"),
        ParamSpec(f"{layer}mlp.up.bias", (F,), 0),
        ParamSpec(f"{layer}mlp.down.weight", (D, F), 1, init_std=out_std, flops_tokens="tokens"),
        ParamSpec(f"{layer}mlp.down.bias", (D,)),
    )

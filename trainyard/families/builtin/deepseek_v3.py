"""DeepSeek-V3 and R1: V2 with sigmoid routing, a bias that balances the experts, and prediction of further tokens."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from trainyard.core.section import NonNegativeInt, PositiveInt
from trainyard.families.blueprint import Blueprint
from trainyard.families.builtin.deepseek_v2 import (
    DEEPSEEK_IGNORED,
    MLA_MODULE,
    deepseek_hf_keys,
    read_deepseek,
    write_deepseek,
)
from trainyard.families.decoder import decoder_hf_format
from trainyard.families.family import Family, HfNameMap, HfTensor
from trainyard.families.mla import MlaConfig, mla_blueprint, mla_names
from trainyard.families.moe import MoeStyle
from trainyard.families.mtp import with_mtp, with_mtp_names


class DeepseekV3Config(MlaConfig):
    """DeepSeek-V3: RMSNorm, RoPE, latent attention, small SwiGLU experts chosen by sigmoids, some of them shared."""

    experts: PositiveInt = 256
    """Number of experts in each layer."""
    top_k: PositiveInt = 8
    """Experts that a token goes to."""
    router_scores: Literal["sigmoid"] = "sigmoid"
    """How the logits of the router become the scores by which experts are chosen and weighted."""
    router_bias: Literal[True] = True
    """Always true: a bias balances the experts. It is added to the router's scores where experts are chosen, not to
    their weights, and moves against the load after each step."""
    group_score: Literal["top2"] = "top2"
    """What a token chooses groups by: the sum of the two largest scores in it."""
    rope_interleave: bool = True
    """RoPE rotates pairs of neighbors and not of halves."""
    mtp_layers: NonNegativeInt = 0
    """Number of blocks after the last layer that predict one token more each, in training only."""
    mtp_loss: float = Field(0.3, ge=0)
    """Weight of their mean loss in the gradients (DeepSeek-V3: 0.3, later 0.1); it is not part of the logged loss."""
    balance_loss: float = Field(0.0, ge=0)
    """Coefficient of the load-balancing loss, a mean over samples and layers; 0: none."""
    norm_eps: float = Field(1e-6, gt=0)
    """Epsilon added to the mean square in RMSNorm."""

    @property
    def rope_interleaved(self) -> bool:  # type: ignore[override]
        return self.rope_interleave

    @property
    def moe_style(self) -> MoeStyle:
        return MoeStyle(stores_router_bias=True)


def blueprint(c: DeepseekV3Config) -> Blueprint:
    return with_mtp(c, mla_blueprint(c))


def hf_names(c: DeepseekV3Config) -> HfNameMap:
    names, bias = mla_names(c), HfTensor("model.layers.*.mlp.gate.e_score_correction_bias")
    return with_mtp_names(c, replace(names, table={**names.table, "layers.*.mlp.router.bias": bias}))


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **read_deepseek(data, 128, dense_layers=3, dense_ffn=18432, expert_ffn=2048, shared=1),
        "expert_groups": data.get("n_group", 8),
        "top_k_groups": data.get("topk_group", 4),
        "balance_loss": data.get("aux_loss_alpha", 0.0),
    }


FAMILY = Family(
    name="deepseek_v3",
    config_class=DeepseekV3Config,
    module=MLA_MODULE,
    blueprint=blueprint,
    hf=decoder_hf_format(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        keys={
            **deepseek_hf_keys(4096, bos_token_id=0, eos_token_id=1, expert_ffn=2048),
            "experts": ("n_routed_experts", 256),
            "top_k": ("num_experts_per_tok", 8),
            "normalize_top_k": ("norm_topk_prob", True),
            "routed_scale": ("routed_scaling_factor", 2.5),
            "rope_interleave": ("rope_interleave", True),
            "mtp_layers": ("num_nextn_predict_layers", 1),
        },
        names=hf_names,
        fixed={
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        ignored=DEEPSEEK_IGNORED,
        read=read,
        write=write_deepseek,
    ),
)

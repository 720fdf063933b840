"""DeepSeek-V2 and V2-Lite: latent attention, many small experts and shared ones, the first layers dense."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families.blueprint import layers_text
from trainyard.families.decoder import decoder_hf_format, decoder_hf_keys, write_decoder
from trainyard.families.family import REQUIRED, Family, HfKeys
from trainyard.families.mla import MlaConfig, mla_blueprint, mla_names
from trainyard.families.rope import ROPE_HF_KEYS, read_rope

MLA_MODULE = "trainyard.models.mla:MlaDecoder"
GREEDY, GROUPS = "greedy", "group_limited_greedy"
DEEPSEEK_IGNORED = (
    *ROPE_HF_KEYS, "aux_loss_alpha", "ep_size", "first_k_dense_replace", "head_dim", "intermediate_size", "n_group",
    "n_shared_experts", "num_key_value_heads", "qk_head_dim", "seq_aux", "topk_group",
)  # fmt: skip
"""Keys of both families that have no influence, or are read by `read_deepseek`."""


class DeepseekV2Config(MlaConfig):
    """DeepSeek-V2: RMSNorm, RoPE, latent attention, small SwiGLU experts of which some are shared."""

    experts: PositiveInt = 64
    """Number of experts in each layer."""
    normalize_top_k: Literal[False] = False
    """Always false: the weights of a token's experts are its router's probabilities."""
    group_score: Literal["max"] = "max"
    """What a token chooses groups by: the largest probability in it."""
    balance_loss: float = Field(0.001, ge=0)
    """Coefficient of the load-balancing loss, a mean over samples and layers; 0: none."""
    norm_eps: float = Field(1e-6, gt=0)
    """Epsilon added to the mean square in RMSNorm."""


def deepseek_hf_keys(max_positions: int, bos_token_id: int, eos_token_id: int, expert_ffn: int) -> HfKeys:
    """The keys that both families have, with the defaults that differ."""
    keys = decoder_hf_keys(
        max_positions=max_positions, rope_theta=10000.0, norm_eps=1e-6, bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
    )  # fmt: skip
    sizes = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    return {
        **{key: value for key, value in keys.items() if key not in ("kv_heads", "head_dim")},
        **{key: (key, default) for key, default in {**sizes, "v_head_dim": 128, "attention_bias": False}.items()},
        "ffn": ("moe_intermediate_size", expert_ffn),
    }


def read_deepseek(
    data: Mapping[str, Any], kv_heads: int | None, dense_layers: int, dense_ffn: int, expert_ffn: int, shared: int
) -> dict[str, Any]:
    """Keys that need more than renaming, with the family's defaults."""
    heads, dense = data["num_attention_heads"], data.get("first_k_dense_replace", dense_layers)
    if (found := data.get("num_key_value_heads", kv_heads)) not in (None, heads):
        raise ValueError(f"num_key_value_heads={found}: latent attention has one for each head; nearest: {heads}")
    rope = read_rope(data)
    scaling = data.get("rope_scaling") or data.get("rope_parameters") or {}
    if scaling.get("mscale_all_dim") and (rope["rope_scaling"] or {}).get("kind", "yarn") != "yarn":
        kind = rope["rope_scaling"]["kind"]
        raise ValueError(f"mscale_all_dim={scaling['mscale_all_dim']}: not supported for {kind}; nearest: 0")
    first = layers_text(range(min(dense, data["num_hidden_layers"])))
    return {
        **rope,
        "dense_layers": first,
        "dense_ffn": data.get("intermediate_size", dense_ffn) if first else None,
        "shared_ffn": data.get("n_shared_experts", shared) * data.get("moe_intermediate_size", expert_ffn),
    }


def write_deepseek(c: MlaConfig) -> dict[str, Any]:
    shared = (c.shared_ffn or 0) // c.ffn
    return {
        **write_decoder(c),
        "head_dim": c.qk_rope_head_dim,
        "qk_head_dim": c.head_size,
        "intermediate_size": c.dense_ffn or c.ffn,
        "first_k_dense_replace": c.layers - len(c.expert_layers),
        "n_shared_experts": shared,
        "n_group": c.expert_groups,
        "topk_group": c.top_k_groups,
    }


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    method = data.get("topk_method", GREEDY)
    if method not in (GREEDY, GROUPS):
        raise ValueError(f"topk_method={method}: not supported; one of {GREEDY}, {GROUPS}")
    groups = {"expert_groups": data.get("n_group"), "top_k_groups": data.get("topk_group")}
    return {
        **read_deepseek(data, None, dense_layers=0, dense_ffn=11008, expert_ffn=1407, shared=2),
        **(groups if method == GROUPS else {}),
        "balance_loss": data.get("aux_loss_alpha", 0.001),
    }


FAMILY = Family(
    name="deepseek_v2",
    config_class=DeepseekV2Config,
    module=MLA_MODULE,
    blueprint=mla_blueprint,
    hf=decoder_hf_format(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        keys={
            **deepseek_hf_keys(2048, bos_token_id=1, eos_token_id=2, expert_ffn=1407),
            "experts": ("n_routed_experts", 64),
            "top_k": ("num_experts_per_tok", REQUIRED),
            "routed_scale": ("routed_scaling_factor", 1.0),
        },
        names=mla_names,
        fixed={
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "moe_layer_freq": 1,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
        },
        ignored=(*DEEPSEEK_IGNORED, "topk_method"),
        read=read,
        write=lambda c: {**write_deepseek(c), "topk_method": GROUPS if c.expert_groups > 1 else GREEDY},
    ),
)

"""Mixtral: Mistral's block with a mixture of experts."""

from trainyard.core.section import PositiveInt
from trainyard.families.decoder import (
    DECODER_MODULE,
    decoder_hf_format,
    decoder_hf_keys,
    decoder_hf_names,
    read_default_head_dim,
)
from trainyard.families.family import Family, HfNameMap, HfTensor
from trainyard.families.moe import MoeConfig, moe_blueprint, moe_layer_names

HF_MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}


class MixtralConfig(MoeConfig):
    """Mixtral: RMSNorm, RoPE, grouped-query attention, SwiGLU experts of which each token uses two, no biases."""

    experts: PositiveInt = 8
    """Number of experts in each layer."""
    top_k: PositiveInt = 2
    """Experts that a token goes to."""
    sliding_window: PositiveInt | None = None
    """Number of tokens, its own included, that a token attends to at most. Default: all tokens before it."""

    def attention_window(self, layer: int) -> int | None:
        return self.sliding_window


def hf_names(c: MixtralConfig) -> HfNameMap:
    layer = "model.layers.*.block_sparse_moe."
    experts = {
        ours: HfTensor(f"{layer}experts.{key.split('.')[0]}.{HF_MATRICES[key.split('.')[1]]}.weight")
        for key, ours in moe_layer_names(c).items()
    }
    return decoder_hf_names(c, {"layers.*.mlp.router.weight": HfTensor(f"{layer}gate.weight"), **experts})


FAMILY = Family(
    name="mixtral",
    config_class=MixtralConfig,
    module=DECODER_MODULE,
    blueprint=moe_blueprint,
    hf=decoder_hf_format(
        "mixtral",
        "MixtralForCausalLM",
        keys={
            **decoder_hf_keys(
                kv_heads=8, max_positions=4096 * 32, rope_theta=1000000.0, norm_eps=1e-5, bos_token_id=1, eos_token_id=2
            ),
            "sliding_window": ("sliding_window", None),
            "experts": ("num_local_experts", 8),
            "top_k": ("num_experts_per_tok", 2),
            "balance_loss": ("router_aux_loss_coef", 0.001),
        },
        names=hf_names,
        fixed={"hidden_act": "silu", "attention_dropout": 0.0, "router_jitter_noise": 0.0},
        read=read_default_head_dim,
    ),
    nxd_styles=("hf",),
)

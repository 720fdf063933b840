"""A family from outside the package whose layers differ: the first ones have a dense MLP, later ones experts, and
every other layer a sliding window; the others know positions in another way, the last of them by the mask alone."""

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families import Family
from trainyard.families.blueprint import parse_layers
from trainyard.families.decoder import (
    DECODER_MODULE,
    decoder_hf_format,
    decoder_hf_keys,
    decoder_hf_names,
)
from trainyard.families.family import HfNameMap
from trainyard.families.moe import MoeConfig, moe_blueprint, moe_hf_names
from trainyard.families.rope import QueryScale, Rope


class TwoKindsConfig(MoeConfig):
    """Two dense layers, then experts; windows in odd layers."""

    dense_layers: str | None = "0-1"
    """Layers without experts."""
    window_layers: str = "odd"
    """Layers with a sliding window."""
    window: PositiveInt = Field(8)
    """Number of tokens, its own included, that a token of those layers attends to at most."""

    def rope_of(self, layer: int) -> Rope | None:
        if self.attention_window(layer):
            return super().rope_of(layer)
        half = Rope(500.0, self.head_size // 2, self.max_positions, interleaved=True, query_scale=QueryScale(4.0, 0.1))
        return half if layer == 0 else None

    def attention_window(self, layer: int) -> int | None:
        return self.window if layer in parse_layers(self.window_layers, self.layers) else None


def hf_names(c: TwoKindsConfig) -> HfNameMap:
    return decoder_hf_names(c, moe_hf_names(c))


FAMILY = Family(
    name="two_kinds",
    config_class=TwoKindsConfig,
    module=DECODER_MODULE,
    blueprint=moe_blueprint,
    hf=decoder_hf_format(
        "two_kinds",
        "TwoKindsForCausalLM",
        keys={
            **decoder_hf_keys(kv_heads=2, max_positions=64, rope_theta=10000.0, norm_eps=1e-5),
            "experts": ("num_experts", 4),
            "top_k": ("num_experts_per_tok", 2),
            "normalize_top_k": ("norm_topk_prob", True),
            "balance_loss": ("router_aux_loss_coef", 0.01),
            "dense_ffn": ("dense_intermediate_size", 64),
            "dense_layers": ("dense_layers", "0-1"),
            "window_layers": ("window_layers", "odd"),
            "window": ("sliding_window", 8),
        },
        names=hf_names,
    ),
)

TWO_KINDS = {
    "family": "tests.support.two_kinds:FAMILY",
    "vocab": 260,
    "hidden": 32,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "dense_ffn": 80,
    "max_positions": 64,
    "experts": 4,
    "top_k": 2,
    "balance_loss": 0.1,
    "z_loss": 0.01,
}
"""Four layers of four kinds: each is dense or has experts, with or without a window."""

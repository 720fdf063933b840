"""What models with gated delta nets have in common: keys, parameters of such a layer, and their Hugging Face names."""

from collections.abc import Collection
from typing import Self

from pydantic import Field, model_validator

from trainyard.core.section import PositiveInt, nearest_multiples
from trainyard.families.blueprint import FusedPart, ParamSpec, parse_layers
from trainyard.families.decoder import DecoderConfig
from trainyard.families.family import HfTensor
from trainyard.families.model_config import Recurrence

LAYER = "layers.*.attention."


class GatedDeltaConfig(DecoderConfig):
    """A decoder with gated delta nets in the place of attention in most layers."""

    attention_layers: str | None = None
    """Layers with attention, such as 3,7 or odd; all others have a gated delta net. Default: every fourth."""
    delta_key_heads: PositiveInt = 16
    """Number of query and key heads of a gated delta net; must be divisible by layout.tp."""
    delta_value_heads: PositiveInt = 32
    """Number of its value heads, a multiple of its key heads."""
    delta_key_dim: PositiveInt = 128
    """Width of its query and key heads."""
    delta_value_dim: PositiveInt = 128
    """Width of its value heads."""
    conv_width: int = Field(4, ge=2)
    """Tokens, its own included, that the convolution before the delta rule sums up for each channel."""

    @model_validator(mode="after")
    def _check_delta(self) -> Self:
        heads, keys = self.delta_value_heads, self.delta_key_heads
        if heads % keys:
            nearest = nearest_multiples(heads, keys)
            raise ValueError(f"delta_value_heads={heads}: not a multiple of delta_key_heads={keys}; nearest: {nearest}")
        assert self.full_attention_layers is not None  # reads `attention_layers`
        return self

    @property
    def full_attention_layers(self) -> Collection[int]:
        text = self.attention_layers
        return range(3, self.layers, 4) if text is None else parse_layers(text, self.layers) if text else ()

    @property
    def ffn_sizes(self) -> dict[str, int]:
        return {**super().ffn_sizes, "delta_key_heads": self.delta_key_heads}

    @property
    def delta_channels(self) -> dict[str, int]:
        """Channels of the convolution: those of queries, keys and values."""
        keys = self.delta_key_heads * self.delta_key_dim
        return {"q": keys, "k": keys, "v": self.delta_value_heads * self.delta_value_dim}

    def recurrence(self, layer: int) -> Recurrence | None:
        if layer in self.full_attention_layers:
            return None
        state, channels = self.delta_value_heads * self.delta_key_dim * self.delta_value_dim, self.delta_channels
        window = (self.conv_width - 1) * sum(channels.values())
        # A token reads what the state has for its key, adds to it, and reads it for its query.
        return Recurrence(state + window, 3 * 2 * state + 2 * self.conv_width * sum(channels.values()))


def delta_specs(c: GatedDeltaConfig) -> list[ParamSpec]:
    """The parameters of a gated delta net. The rows of its projections are in groups, a key head with its value heads,
    and a tensor-parallel rank has some of the groups."""
    groups, channels, heads = c.delta_key_heads, c.delta_channels, c.delta_value_heads

    def projection(name: str, rows: int) -> ParamSpec:
        parts = (FusedPart(f"{LAYER}{name}.weight", rows, groups),)
        return ParamSpec(
            f"{LAYER}{name}.weight", (rows, c.hidden), 0, parts, "block", c.init_std, flops_tokens="tokens"
        )

    conv = tuple(FusedPart(f"{LAYER}conv.{name}.weight", size, groups) for name, size in channels.items())
    conv_shape = (sum(channels.values()), 1, c.conv_width)
    return [
        projection("qkvz", sum(channels.values()) + channels["v"]),
        projection("ba", 2 * heads),
        ParamSpec(f"{LAYER}conv.weight", conv_shape, 0, conv, "block", c.init_std),
        ParamSpec(f"{LAYER}log_rate", (heads,), 0, init_log_range=(0.01, 16.0)),
        ParamSpec(f"{LAYER}rate_bias", (heads,), 0, init_value=1.0),
        ParamSpec(f"{LAYER}norm.weight", (c.delta_value_dim,), init_value=1.0, tp_gradient="partial"),
        ParamSpec(
            f"{LAYER}out.weight", (c.hidden, channels["v"]), 1, (), "block", c.output_init_std, 0.0, None, "tokens"
        ),
    ]


DELTA_HF_NAMES = {
    "qkvz.weight": "in_proj_qkvz.weight",
    "ba.weight": "in_proj_ba.weight",
    **{f"conv.{part}.weight": "conv1d.weight" for part in "qkv"},
    "log_rate": "A_log",
    "rate_bias": "dt_bias",
    "norm.weight": "norm.weight",
    "out.weight": "out_proj.weight",
}


def delta_hf_names() -> dict[str, HfTensor]:
    """The names of a gated delta net's tensors."""
    return {f"{LAYER}{ours}": HfTensor(f"model.layers.*.linear_attn.{hf}") for ours, hf in DELTA_HF_NAMES.items()}

"""SmolLM3: Llama's block without RoPE in every fourth layer."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import Field

from trainyard.families.blueprint import layers_text
from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderStyle,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
    read_default_head_dim,
    write_decoder,
)
from trainyard.families.decoder_keys import (
    BiasedDecoderConfig,
    PartlyRotaryConfig,
    WindowedDecoderConfig,
    full_layers_of,
    no_rope_layers_of,
    read_layers_without_rope,
    write_layer_types,
    write_no_rope_layers,
)
from trainyard.families.family import Family
from trainyard.families.rope import ROPE_HF_KEYS


class SmolLM3Config(BiasedDecoderConfig, WindowedDecoderConfig, PartlyRotaryConfig):
    """SmolLM3: RMSNorm, RoPE in three layers of four, grouped-query attention, SwiGLU."""

    rope_theta: float = Field(2000000.0, gt=1)
    """Base of the RoPE frequencies."""
    tie_embeddings: bool = True
    """Share one matrix between the input embedding and the output head."""
    full_attention_layers: str | None = None
    """The layers without a window, as for `no_rope_layers`. Default: those with RoPE."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(biases=self.biases)

    @property
    def full_layers(self) -> Collection[int]:
        if self.full_attention_layers is None:
            return set(range(self.layers)).difference(self.layers_without_rope)
        return super().full_layers


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    count, has_windows = data["num_hidden_layers"], data.get("use_sliding_window") and data.get("sliding_window")
    without = read_layers_without_rope(data)
    full = [layer for layer in range(count) if layer not in without]
    kinds = data.get("layer_types")
    named = full_layers_of(kinds, count) if kinds else full
    if kinds and data.get("sliding_window") and not has_windows and len(named) < count:
        # transformers' mask has windows then, and its attention has none
        raise ValueError("use_sliding_window=false: layer_types has sliding_attention; nearest: true")
    return {
        **read_default_head_dim(data),
        "sliding_window": data["sliding_window"] if has_windows else None,
        "no_rope_layers": no_rope_layers_of(without, count),
        "full_attention_layers": None if named == full or not has_windows else layers_text(named) or "none",
    }


def write(c: SmolLM3Config) -> dict[str, Any]:
    windows = {"use_sliding_window": c.sliding_window is not None, "sliding_window": c.sliding_window}
    return {
        **write_decoder(c),
        **windows,
        **(write_layer_types(c) if c.sliding_window else {}),
        **write_no_rope_layers(c),
    }


FAMILY = Family(
    name="smollm3",
    config_class=SmolLM3Config,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "smollm3",
        "SmolLM3ForCausalLM",
        keys={
            **decoder_hf_keys(
                kv_heads=4,
                max_positions=32768,
                rope_theta=2000000.0,
                norm_eps=1e-6,
                tie_embeddings=True,
                bos_token_id=128000,
                eos_token_id=128001,
                pad_token_id=128004,
            ),
            **{key: (key, False) for key in ("attention_bias", "mlp_bias")},
        },
        ignored=(
            *ROPE_HF_KEYS,
            "no_rope_layers",
            "no_rope_layer_interval",
            "use_sliding_window",
            "sliding_window",
            "layer_types",
            "max_window_layers",
        ),
        read=read,
        write=write,
    ),
)

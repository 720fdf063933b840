"""Keys that some decoders have: biases, the activation of the MLP, and windows in some of the layers."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import model_validator

from trainyard.core.section import PositiveInt
from trainyard.families.blueprint import layers_text, parse_layers
from trainyard.families.decoder import Activation, DecoderConfig, HfKeyGroup
from trainyard.families.rope import Rope

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""By the names of transformers."""
ACTIVATION_NAMES = {ours: name for name, ours in ACTIVATIONS.items() if name not in ("swish", "gelu_new")}
"""The names of transformers that are written."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Layers in transformers' `layer_types`."""


class BiasedDecoderConfig(DecoderConfig):
    """A decoder whose linear layers may have biases."""

    attention_bias: bool = False
    """Biases in the four linear layers of attention."""
    mlp_bias: bool = False
    """Biases in the linear layers of the MLP."""

    @property
    def biases(self) -> Collection[str]:
        return (*(("qkv", "output") if self.attention_bias else ()), *(("mlp",) if self.mlp_bias else ()))


class WindowedDecoderConfig(DecoderConfig):
    """A decoder with a sliding window in all layers but some."""

    window_period: ClassVar[int | None] = 2
    """Every layer of this period but the last one has a window, unless `full_attention_layers` says otherwise; None:
    all layers have one."""
    sliding_window: PositiveInt | None = None
    """Number of tokens, its own included, that a token attends to at most in layers with a window. Default: all tokens
    before it."""
    full_attention_layers: str | None = None
    """The layers without a window, such as 0-2, 3-, even, odd or 0,5-7; `none`: all have one. Default: every second
    layer, or those of the family."""

    @property
    def full_layers(self) -> Collection[int]:
        if self.full_attention_layers is None:
            return periodic_layers(self.window_period, self.layers)
        return () if self.full_attention_layers == "none" else parse_layers(self.full_attention_layers, self.layers)

    def attention_window(self, layer: int) -> int | None:
        return None if layer in self.full_layers else self.sliding_window

    @model_validator(mode="after")
    def _check_full_layers(self) -> Self:
        assert self.full_layers is not None  # reads `full_attention_layers`
        return self


def activation_keys(hf_key: str = "hidden_act", default: str = "silu") -> HfKeyGroup:
    """The key `activation`."""

    def read(data: Mapping[str, Any]) -> dict[str, Any]:
        name = data.get(hf_key) or default
        if name not in ACTIVATIONS:
            raise ValueError(f"{hf_key}={name}: not supported; one of {', '.join(ACTIVATIONS)}")
        return {"activation": ACTIVATIONS[name]}

    return HfKeyGroup((hf_key,), read, lambda c: {hf_key: ACTIVATION_NAMES[c.activation]})


def periodic_layers(period: int | None, layers: int) -> range:
    """The last layer of each period; None: no layer."""
    return range(period - 1, layers, period) if period else range(0)


def layer_type_keys(period: int | None, period_key: str = "layer_types") -> HfKeyGroup:
    """The key `full_attention_layers` from transformers' `layer_types`, or from a period where a file has that."""

    def read(data: Mapping[str, Any]) -> dict[str, Any]:
        kinds, count = data.get("layer_types"), data["num_hidden_layers"]
        default = list(periodic_layers(period, count))
        if kinds is None:
            own_period = data.get(period_key) or data.get(f"_{period_key}") or period
            full = list(periodic_layers(own_period, count))
        else:
            full = full_layers_of(kinds, count)
        return {"full_attention_layers": None if full == default else layers_text(full) or "none"}

    return HfKeyGroup(("layer_types", period_key), read, write_layer_types)


def full_layers_of(kinds: Sequence[Any], count: int) -> list[int]:
    """The layers without a window in a file's `layer_types`."""
    if unknown := sorted({str(kind) for kind in kinds} - {FULL, SLIDING}):
        raise ValueError(f"layer_types={unknown[0]}: not supported; one of {FULL}, {SLIDING}")
    if len(kinds) != count:
        raise ValueError(f"layer_types: {len(kinds)} of them for num_hidden_layers={count}")
    return [layer for layer, kind in enumerate(kinds) if kind == FULL]


def write_layer_types(c: WindowedDecoderConfig) -> dict[str, Any]:
    return {"layer_types": [FULL if layer in c.full_layers else SLIDING for layer in range(c.layers)]}


class PartlyRotaryConfig(DecoderConfig):
    """A decoder without RoPE in some layers."""

    no_rope_layers: str | None = None
    """Layers without RoPE, such as 0-2, 3-, even, odd or 0,5-7; `none`: no layer. Default: every fourth."""

    @property
    def layers_without_rope(self) -> Collection[int]:
        if self.no_rope_layers is None:
            return periodic_layers(4, self.layers)
        return () if self.no_rope_layers == "none" else parse_layers(self.no_rope_layers, self.layers)

    def rope_of(self, layer: int) -> Rope | None:
        return None if layer in self.layers_without_rope else super().rope_of(layer)


def read_layers_without_rope(data: Mapping[str, Any]) -> list[int]:
    """From transformers' flags, which are true for layers with RoPE, or from its interval."""
    flags, count = data.get("no_rope_layers"), data["num_hidden_layers"]
    if not flags:
        flags = [(layer + 1) % data.get("no_rope_layer_interval", 4) for layer in range(count)]
    if len(flags) != count:
        raise ValueError(f"no_rope_layers: {len(flags)} of them for num_hidden_layers={count}")
    return [layer for layer, has_rope in enumerate(flags) if not has_rope]


def no_rope_layers_of(without: Sequence[int], count: int) -> str | None:
    """The key `no_rope_layers` of a model of `count` layers."""
    return None if list(without) == list(periodic_layers(4, count)) else layers_text(without) or "none"


def write_no_rope_layers(c: PartlyRotaryConfig) -> dict[str, Any]:
    return {"no_rope_layers": [int(layer not in c.layers_without_rope) for layer in range(c.layers)]}

"""Keys that some decoders have: biases, the activation of the gate, and windows in some of the layers."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, Strict, model_validator

from trainyard.core.section import PositiveInt
from trainyard.families.decoder import DecoderConfig, GateActivation, HfKeyGroup

ACTIVATIONS: Mapping[str, GateActivation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""By the names of transformers."""
ACTIVATION_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
"""The names of transformers that are written."""
LayerIndices = Annotated[tuple[int, ...], Strict(False)]
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

    window_period: ClassVar[int] = 2
    """Every layer of this period but the last one has a window, unless `full_attention_layers` says otherwise."""
    sliding_window: PositiveInt | None = None
    """Number of tokens, its own included, that a token attends to at most in layers with a window. Default: all tokens
    before it."""
    full_attention_layers: LayerIndices | None = Field(None)
    """The layers without a window. Default: every second one, or as the family has it."""

    @property
    def full_layers(self) -> Collection[int]:
        if self.full_attention_layers is not None:
            return self.full_attention_layers
        return range(self.window_period - 1, self.layers, self.window_period)

    def attention_window(self, layer: int) -> int | None:
        return None if layer in self.full_layers else self.sliding_window

    @model_validator(mode="after")
    def _check_full_layers(self) -> Self:
        if outside := [layer for layer in self.full_attention_layers or () if not 0 <= layer < self.layers]:
            raise ValueError(f"full_attention_layers: the layers are 0 to {self.layers - 1}, found {outside[0]}")
        return self


def activation_keys(hf_key: str = "hidden_act", default: str = "silu") -> HfKeyGroup:
    """The key `activation`."""

    def read(data: Mapping[str, Any]) -> dict[str, Any]:
        name = data.get(hf_key) or default
        if name not in ACTIVATIONS:
            raise ValueError(f"{hf_key}={name}: not supported; one of {', '.join(ACTIVATIONS)}")
        return {"activation": ACTIVATIONS[name]}

    return HfKeyGroup((hf_key,), read, lambda c: {hf_key: ACTIVATION_NAMES[c.activation]})


def layer_type_keys(period: int) -> HfKeyGroup:
    """The key `full_attention_layers` from transformers' `layer_types`; None if they are those of the period."""

    def read(data: Mapping[str, Any]) -> dict[str, Any]:
        kinds, count = data.get("layer_types"), data["num_hidden_layers"]
        if kinds is None:
            return {"full_attention_layers": None}
        if unknown := sorted({str(kind) for kind in kinds} - {FULL, SLIDING}):
            raise ValueError(f"layer_types={unknown[0]}: not supported; one of {FULL}, {SLIDING}")
        if len(kinds) != count:
            raise ValueError(f"layer_types: {len(kinds)} of them for num_hidden_layers={count}")
        full = tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)
        return {"full_attention_layers": None if full == tuple(range(period - 1, count, period)) else full}

    def write(c: Any) -> dict[str, Any]:
        return {"layer_types": [FULL if layer in c.full_layers else SLIDING for layer in range(c.layers)]}

    return HfKeyGroup(("layer_types",), read, write)

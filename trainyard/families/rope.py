"""Rotary position embeddings: their keys, what a layer has of them, and config.json.

The kinds of scaling are those of transformers (modeling_rope_utils.py), with its formulas in models/layers/rope.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from trainyard.core.section import PositiveInt, Section

Factor = Annotated[float, Field(ge=1)]
Divisors = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Strict(False), Field(min_length=1)]


class LinearRopeScaling(Section):
    """Position interpolation: positions are divided by a factor, as in DeepSeek-Coder."""

    kind: Literal["linear"] = "linear"
    """Kind of RoPE scaling."""
    factor: Factor
    """Ratio of the extended context to the trained context; 1 or more."""


class DynamicRopeScaling(Section):
    """NTK-aware scaling: the base grows with the length of the sequence, from the trained context on."""

    kind: Literal["dynamic"] = "dynamic"
    """Kind of RoPE scaling."""
    factor: Factor
    """How fast the base grows; 1 or more. The extended context has about this many times the trained one."""
    original_max_positions: PositiveInt
    """Context length in tokens before scaling; shorter sequences are not scaled."""


class Llama3RopeScaling(Section):
    """RoPE scaling of Llama 3.1: divides low frequencies by a factor, keeps high ones, interpolates in between."""

    kind: Literal["llama3"] = "llama3"
    """Kind of RoPE scaling."""
    factor: Factor = 8.0
    """Divisor of the low frequencies; 1 or more."""
    low_freq_factor: float = Field(1.0, gt=0)
    """Wavelengths longer than original_max_positions / low_freq_factor are scaled in full."""
    high_freq_factor: float = Field(4.0, gt=0)
    """Wavelengths shorter than original_max_positions / high_freq_factor are not scaled."""
    original_max_positions: PositiveInt = 8192
    """Context length in tokens before scaling."""


class YarnRopeScaling(Section):
    """YaRN: divides low frequencies by a factor, keeps high ones, and sharpens attention a little."""

    kind: Literal["yarn"] = "yarn"
    """Kind of RoPE scaling."""
    factor: Factor
    """Ratio of the extended context to the trained context; 1 or more."""
    original_max_positions: PositiveInt
    """Context length in tokens before scaling."""
    beta_fast: float = Field(32.0, gt=0)
    """Pairs that turn more often than this over the trained context are not scaled."""
    beta_slow: float = Field(1.0, gt=0)
    """Pairs that turn less often than this over the trained context are scaled in full."""
    attention_factor: float | None = Field(None, gt=0)
    """Factor of cosines and sines. Default: 0.1 ln(factor) + 1, or what mscale and mscale_all_dim say."""
    mscale: float | None = None
    """With mscale_all_dim: the attention factor is the ratio of 0.1 x ln(factor) + 1 for this x and for that one."""
    mscale_all_dim: float | None = None
    """See mscale."""
    truncate: bool = True
    """Round the first and last pair between the two limits to whole pairs."""


class LongRopeScaling(Section):
    """LongRoPE, as in Phi-3: a divisor for each frequency, one list up to the trained context, another beyond."""

    kind: Literal["longrope"] = "longrope"
    """Kind of RoPE scaling."""
    short_factor: Divisors
    """Divisors of the frequencies in sequences within the trained context: a list, half as long as a head rotates."""
    long_factor: Divisors
    """Divisors of the frequencies in longer sequences."""
    original_max_positions: PositiveInt
    """Context length in tokens before scaling."""
    factor: float | None = Field(None, gt=0)
    """Ratio of contexts from which the attention factor follows. Default: max_positions / original_max_positions."""
    attention_factor: float | None = Field(None, gt=0)
    """Factor of cosines and sines. Default: sqrt(1 + ln(factor) / ln(original_max_positions))."""


RopeScaling = Annotated[
    LinearRopeScaling | DynamicRopeScaling | Llama3RopeScaling | YarnRopeScaling | LongRopeScaling,
    Field(discriminator="kind"),
]
ROPE_SCALING_CLASSES: dict[str, type[Section]] = {
    "linear": LinearRopeScaling,
    "dynamic": DynamicRopeScaling,
    "llama3": Llama3RopeScaling,
    "yarn": YarnRopeScaling,
    "longrope": LongRopeScaling,
}


@dataclass(frozen=True)
class QueryScale:
    """Queries grow with their position, as in layers of Llama 4 without rotation: those at position p are multiplied
    by 1 + `weight` ln(1 + floor((p + 1) / `interval`))."""

    interval: float
    weight: float


@dataclass(frozen=True)
class Rope:
    """How a layer tells positions. Layers with equal values share one table of cosines and sines."""

    theta: float
    """Base of the frequencies."""
    size: int
    """Dims of a head that rotate, the first ones; the others pass. 0: none."""
    max_positions: int
    scaling: RopeScaling | None = None
    interleaved: bool = False
    """The pairs that rotate are dims (0, 1), (2, 3), ...; otherwise dim i and the one `size` / 2 behind it."""
    query_scale: QueryScale | None = None

    @property
    def pairs(self) -> int:
        return (self.size + 1) // 2

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        scaling = self.scaling
        if not isinstance(scaling, YarnRopeScaling | LongRopeScaling):
            return 1.0
        if scaling.attention_factor is not None:
            return scaling.attention_factor
        if isinstance(scaling, YarnRopeScaling):
            if scaling.mscale and scaling.mscale_all_dim:
                mscales = (yarn_mscale(scaling.factor, x) for x in (scaling.mscale, scaling.mscale_all_dim))
                return next(mscales) / next(mscales)
            return yarn_mscale(scaling.factor)
        factor = scaling.factor or self.max_positions / scaling.original_max_positions
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(scaling.original_max_positions))

    @property
    def static_length(self) -> int | None:
        """The longest sequence that rotates as all shorter ones do; None: there is no limit."""
        scaling = self.scaling
        return scaling.original_max_positions if isinstance(scaling, DynamicRopeScaling | LongRopeScaling) else None


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """The attention factor of YaRN for a ratio of contexts."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def check_rope(rope: Rope) -> None:
    """Refuse lists of divisors that do not fit the frequencies."""
    if isinstance(rope.scaling, LongRopeScaling):
        for key in ("short_factor", "long_factor"):
            if (length := len(getattr(rope.scaling, key))) != rope.pairs:
                raise ValueError(f"rope_scaling.{key}: a list of {length}; nearest: {rope.pairs}, half of {rope.size}")


ROPE_KEYS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_positions": "original_max_position_embeddings",
    },
    "yarn": {"factor": "factor", "original_max_positions": "original_max_position_embeddings"},
    "longrope": {
        "short_factor": "short_factor",
        "long_factor": "long_factor",
        "original_max_positions": "original_max_position_embeddings",
    },
}
"""Key of transformers by our key, for each kind of RoPE scaling."""
OPTIONAL_KEYS: dict[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
}
"""Keys with a default, which have the same name there."""
KNOWN_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}.union(
    *(keys.values() for keys in ROPE_KEYS.values()), *OPTIONAL_KEYS.values()
)
"""Keys of any kind. transformers ignores those of another kind than the file's."""
ROPE_HF_KEYS = ("rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings")
"""Keys of config.json that `read_rope` reads."""


def read_rope(data: Mapping[str, Any], rotary_factor: float | None = None) -> dict[str, Any]:
    """Our keys from a config.json. As in transformers, `rope_scaling` replaces `rope_parameters`, and what is in there
    comes before the keys of the whole file. `rotary_factor` is the default of `partial_rotary_factor` in families with
    this key."""
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    found: dict[str, Any] = {"rope_scaling": read_rope_scaling(rope, data)}
    if "rope_theta" in rope:
        found["rope_theta"] = rope["rope_theta"]
    partial = rope.get("partial_rotary_factor", data.get("partial_rotary_factor"))
    if rotary_factor is not None:
        found["partial_rotary_factor"] = rotary_factor if partial is None else partial
    elif partial not in (None, 1):
        raise ValueError(f"partial_rotary_factor={partial}: not supported; nearest: 1.0")
    scaling = found["rope_scaling"]
    if scaling and scaling["kind"] == "dynamic":  # transformers calls the trained context max_position_embeddings
        found["max_positions"] = int(scaling["factor"] * scaling["original_max_positions"])
    return found


def read_rope_scaling(rope: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` from one set of RoPE keys in a config.json (`data`)."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    for key, value in rope.items():
        if key not in KNOWN_KEYS and value is not None:
            raise ValueError(f"{key}={str(value)[:60]}: not known for RoPE, and may change what the model computes")
    if kind == "default":
        return None
    if kind not in ROPE_KEYS:
        raise ValueError(f"rope_type={kind}: not supported; one of default, {', '.join(ROPE_KEYS)}")
    max_positions, original = data.get("max_position_embeddings"), "original_max_position_embeddings"
    rope = {original: max_positions, **rope}
    if data.get(original) is not None:
        rope[original] = data[original]
    values = {key: rope[hf_key] for key, hf_key in ROPE_KEYS[kind].items()}
    optional = {key: rope[key] for key in OPTIONAL_KEYS.get(kind, ()) if rope.get(key) is not None}
    if kind == "dynamic":
        values["original_max_positions"] = max_positions
    elif kind == "yarn":
        if values["factor"] is None:
            values["factor"] = max_positions / rope[original]
        optional = {key: value for key, value in optional.items() if value or not key.startswith("beta")}
        optional["truncate"] = bool(rope.get("truncate", True))
    return {"kind": kind, **values, **optional}


def write_rope(c: Any) -> dict[str, Any]:
    """The keys of config.json that transformers 4 and 5 read."""
    rope = write_rope_scaling(c.rope_scaling)
    partial = {key: getattr(c, key) for key in ("partial_rotary_factor",) if hasattr(c, key)}
    trained = {}
    if isinstance(c.rope_scaling, DynamicRopeScaling):
        trained["max_position_embeddings"] = c.rope_scaling.original_max_positions
    parameters = {"rope_theta": c.rope_theta, **partial, **rope}
    return {"rope_scaling": rope if c.rope_scaling else None, "rope_parameters": parameters, **partial, **trained}


def write_rope_scaling(scaling: Any) -> dict[str, Any]:
    """One set of RoPE keys without base."""
    if scaling is None:
        return {"rope_type": "default"}
    values = {hf_key: getattr(scaling, key) for key, hf_key in ROPE_KEYS[scaling.kind].items()}
    values |= {key: getattr(scaling, key) for key in OPTIONAL_KEYS.get(scaling.kind, ())}
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {"rope_type": scaling.kind, **{key: value for key, value in values.items() if value is not None}}

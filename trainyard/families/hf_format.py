"""HfFormat: how a family is written by Hugging Face transformers, in config.json and in the names of weights."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

REQUIRED = object()
"""Default of keys that a config.json must have."""
HfKeys = Mapping[str, tuple[str, object]]
"""Key of transformers and its default there, by our key."""


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint."""

    name: str
    transposed: bool = False
    """Stored as [in, out] (GPT-2's Conv1D) instead of our [out, in]."""


@dataclass(frozen=True)
class HfNameMap:
    """Our parameter names to Hugging Face tensors.

    Keys are blueprint parts (the parameter names without fusion). Several parts may map to one Hugging Face tensor
    (GPT-2's c_attn), which then holds them in the order of the map.
    """

    table: dict[str, HfTensor]
    tied: dict[str, str] = field(default_factory=dict)
    """Hugging Face names that repeat another tensor (tied weights): ignored when reading, not written."""


def _no_values(source: Any) -> dict[str, Any]:
    return {}


def _same_name(name: str, names: Collection[str]) -> str:
    return name


@dataclass(frozen=True)
class HfFormat:
    """How one family is written by transformers."""

    model_type: str
    architecture: str
    """The class of transformers for the pre-training task."""
    keys: HfKeys
    names: Callable[[Any], HfNameMap]
    """The names of weights, by a model's configuration."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Options of transformers that change the numbers, with the only supported value (also their default there)."""
    ignored: tuple[str, ...] = ()
    """Keys of this family that change no numbers, or are read by `read`."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = _no_values
    """Values of our keys that need more than renaming, from the content of config.json."""
    write: Callable[[Any], dict[str, Any]] = _no_values
    """The reverse, from a model's configuration."""
    current_name: Callable[[str, Collection[str]], str] = _same_name
    """The current name of a tensor, given its name in an older file and all names there."""

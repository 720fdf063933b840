"""Family: everything that differs between model families, and how other systems write them. The rest of the package
reads this object and no names."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainyard.core.registry import Registry
from trainyard.families.blueprint import Blueprint
from trainyard.families.model_config import ModelConfig

LOSSES: Registry[Any] = Registry(
    "trainyard.train.losses", "LOSS", "trainyard.losses", "trainyard.train.loss:Loss", "train.loss", of_classes=True
)
"""Subclasses of trainyard.Loss by Family.loss or train.loss."""


@dataclass(frozen=True)
class MegatronModel:
    """What a checkpoint of Megatron-LM tells about its model."""

    args: Mapping[str, Any]
    """The stored arguments."""
    mlp_width: int
    """Rows of the first matrix of the MLP over all ranks; gate and up together where there is a gate."""
    positions: int | None
    """Rows of the position embedding, if there is one."""
    notes: list[str]
    """Assumptions to tell the user."""


@dataclass(frozen=True)
class MegatronFormat:
    """How one family is stored by Megatron-LM."""

    required_args: Mapping[str, object]
    """Arguments that identify the family. A missing one has the value given here."""
    read: Callable[[MegatronModel], dict[str, Any]]
    """Values of the family's own keys."""
    gated_mlp: bool
    """The MLP has a gate, stored with the up projection."""


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
    stacked: int | None = None
    """Number of experts whose matrices or biases it stacks along a first dim, in the order of the map."""
    interleaved: bool = False
    """The rows of its parts (of each expert) alternate, as those of gate and up in gpt-oss."""
    groups: int = 1
    """Number of groups that its parts are cut into, each with an equal share of each part (GPT-NeoX's query_key_value:
    a group has q, k and v of a head)."""


@dataclass(frozen=True)
class HfNameMap:
    """Our parameter names to Hugging Face tensors.

    Keys are blueprint parts (the parameter names without fusion). Several parts may map to one Hugging Face tensor
    (GPT-2's c_attn), which then holds them in the order of the map.
    """

    table: dict[str, HfTensor]
    tied: dict[str, str] = field(default_factory=dict)
    """Hugging Face names that repeat another tensor (tied weights): ignored when reading, not written."""
    copies: dict[str, str] = field(default_factory=dict)
    """The same of tensors that are written as well."""


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
    unread: str = "(?!)"
    """A pattern of the names of tensors that files may have and transformers does not load either."""


CAUSAL_FIELDS = ("tokens", "labels")


@dataclass(frozen=True)
class Family:
    """A model family, built in or from outside the package."""

    name: str
    config_class: type[ModelConfig]
    """The keys of the `model` section."""
    module: str | Callable[[Any, Any], Any]
    """Builds a TransformerStage from (configuration, ModuleFactory). As text, `package.module:Class`, it is imported
    when a model is built: reading a configuration then does not import torch."""
    blueprint: Callable[[Any], Blueprint]
    """The parameter table of a model."""
    hf: HfFormat
    """config.json and weight names of Hugging Face."""
    loss: str = "causal_lm"
    """The loss it is trained with unless the user gives one: a name of LOSSES."""
    batch_fields: tuple[str, ...] = CAUSAL_FIELDS
    """Fields of a batch that its samples always have (core/batch.py describes all fields)."""
    score_passes: int = 0
    """Times that each attention score moves through memory where no fused kernel computes attention as this family's
    published runs do (Trainium); 0 if a kernel keeps scores on the chip."""
    nxd_styles: tuple[str, ...] = ()
    """Models of neuronx-distributed that hold this family: `hf` (derived from Hugging Face's), `megatron` (NxDT's)."""
    megatron: MegatronFormat | None = None
    """Its checkpoints of Megatron-LM."""
    torchtitan_names: Mapping[str, str] | None = None
    """torchtitan's names of its tensors by our names, without `.weight`."""

    @property
    def has_padding(self) -> bool:
        """Samples have padding, which attention masks."""
        return "attention_mask" in self.batch_fields

    @property
    def has_masked_positions(self) -> bool:
        """The head predicts some positions only."""
        return "masked_positions" in self.batch_fields

    @property
    def is_causal(self) -> bool:
        """True if it predicts the next token, and can therefore generate text."""
        return bool(LOSSES.find(self.loss).is_causal)

    def visible_keys(self, c: ModelConfig, layer: int, seq_len: int) -> float:
        """Mean number of keys that a query of this layer attends to, for FLOP counts: in a causal model the window,
        but fewer at the start."""
        if not self.is_causal:
            return seq_len
        window = min(c.attention_window(layer) or seq_len, seq_len)
        return window - window * (window - 1) / 2 / seq_len

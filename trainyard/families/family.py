"""Family: everything that differs between model families. The rest of the package reads this object and no names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainyard.families.blueprint import Blueprint
from trainyard.families.hf_format import HfFormat
from trainyard.families.megatron_format import MegatronFormat
from trainyard.families.model_config import ModelConfig

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
    loss: Literal["causal_lm", "bert_pretraining"] = "causal_lm"
    """The loss it is trained with unless the user gives one; train/losses.py implements it."""
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
    def loss_terms(self) -> int:
        """Terms of the loss, each divided by its own count."""
        return 2 if self.loss == "bert_pretraining" else 1

    @property
    def is_causal(self) -> bool:
        """True if it predicts the next token, and can therefore generate text."""
        return self.loss == "causal_lm"

    def visible_keys(self, c: ModelConfig, layer: int, seq_len: int) -> float:
        """Mean number of keys that a query of this layer attends to, for FLOP counts: in a causal model the window,
        but fewer at the start."""
        if not self.is_causal:
            return seq_len
        window = min(c.attention_window(layer) or seq_len, seq_len)
        return window - window * (window - 1) / 2 / seq_len

"""The registry of model families. A new family is one file with a module, a blueprint and a name map, and one entry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import trainyard.models.bert as bert
import trainyard.models.gpt as gpt
import trainyard.models.llama as llama
from trainyard.config.model_schema import BertConfig, GptConfig, LlamaConfig
from trainyard.models.base import TransformerStage
from trainyard.models.blueprint import Blueprint
from trainyard.models.factory import ModuleFactory
from trainyard.models.hf_names import HfNameMap

AnyModelConfig = LlamaConfig | GptConfig | BertConfig
CAUSAL_FIELDS = ("tokens", "labels")
BERT_FIELDS = ("tokens", "labels", "attention_mask", "segment_ids", "masked_positions", "next_sentence_labels")


@dataclass(frozen=True)
class Family:
    """Everything that differs between model families."""

    config_class: type[LlamaConfig] | type[GptConfig] | type[BertConfig]
    module_class: Callable[[Any, ModuleFactory], TransformerStage]
    blueprint: Callable[[Any], Blueprint]
    hf_names: Callable[[Any], HfNameMap]
    loss: Literal["causal_lm", "bert_pretraining"]
    """The loss it is trained with unless the user gives one; train/losses.py implements it."""
    batch_fields: tuple[str, ...]
    """Fields of a batch that its samples always have (core/batch.py describes all fields)."""
    score_passes: int = 0
    """Times that each attention score moves through memory where no fused kernel computes attention as this family's
    published runs do (Trainium); 0 if a kernel keeps scores on the chip."""

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


FAMILIES = {
    "llama": Family(LlamaConfig, llama.Llama, llama.blueprint, llama.hf_names, "causal_lm", CAUSAL_FIELDS),
    "gpt": Family(GptConfig, gpt.Gpt, gpt.blueprint, gpt.hf_names, "causal_lm", CAUSAL_FIELDS, 4),
    "bert": Family(BertConfig, bert.Bert, bert.blueprint, bert.hf_names, "bert_pretraining", BERT_FIELDS, 12),
}


def family_of(c: AnyModelConfig) -> Family:
    return FAMILIES[c.family]

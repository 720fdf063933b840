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


FAMILIES = {
    "llama": Family(LlamaConfig, llama.Llama, llama.blueprint, llama.hf_names, "causal_lm", CAUSAL_FIELDS),
    "gpt": Family(GptConfig, gpt.Gpt, gpt.blueprint, gpt.hf_names, "causal_lm", CAUSAL_FIELDS),
    "bert": Family(BertConfig, bert.Bert, bert.blueprint, bert.hf_names, "bert_pretraining", BERT_FIELDS),
}


def family_of(c: AnyModelConfig) -> Family:
    return FAMILIES[c.family]

"""Finds model families: the built-in ones, those of installed packages, and `module:NAME` of any other."""

from dataclasses import replace
from functools import cache

from trainyard.core.registry import Registry
from trainyard.families.blueprint import SCORE_HEAD, Blueprint, with_score_head
from trainyard.families.family import Family, HfNameMap, HfTensor
from trainyard.families.model_config import ModelConfig

# Without a key: a checkpoint must not run code from the directory in which it lies.
FAMILIES: Registry[Family] = Registry(
    "trainyard.families.builtin", "FAMILY", "trainyard.families", "trainyard.families.family:Family"
)


@cache
def all_families() -> dict[str, Family]:
    """The built-in families and those of installed packages, by name."""
    return {name: find_family(name) for name in FAMILIES.names()}


@cache
def find_family(name: str) -> Family:
    """The family with this name. Raises UserError if there is none."""
    family = FAMILIES.find(name)
    return family if name in FAMILIES.built_in else replace(family, name=name)  # by which a configuration finds it


def family_of(model: ModelConfig) -> Family:
    return find_family(model.family)


def blueprint_of(model: ModelConfig) -> Blueprint:
    """The parameter table of a model: that of its family, and what is put around its linear layers."""
    blueprint = family_of(model).blueprint(model)
    if model.score_head:
        blueprint = with_score_head(blueprint, model.hidden, model.init_std)
    for wrapper, options in model.linear.wrappers():
        blueprint = wrapper.extend(blueprint, options)
    return blueprint


def predicts_tokens(model: ModelConfig) -> bool:
    """True for a causal model that is no reward model, and can therefore generate text."""
    return family_of(model).is_causal and not model.score_head


def hf_names(model: ModelConfig) -> HfNameMap:
    """The names of a model's weights in Hugging Face checkpoints."""
    names = family_of(model).hf.names(model)
    return HfNameMap({**names.table, SCORE_HEAD: HfTensor(SCORE_HEAD)}) if model.score_head else names

"""Model families: one file each with keys, parameter table and the names of other systems. No torch in here."""

from trainyard.families.blueprint import Blueprint, ParamSpec
from trainyard.families.family import Family
from trainyard.families.model_config import ModelConfig
from trainyard.families.registry import all_families, blueprint_of, family_of, find_family

__all__ = [
    "Blueprint",
    "Family",
    "ModelConfig",
    "ParamSpec",
    "all_families",
    "blueprint_of",
    "family_of",
    "find_family",
]

"""The modules of the model families, and how to build one: `build_model`, then `fill_parameters`."""

from trainyard.core.batch import Batch
from trainyard.families import Blueprint, Family, ModelConfig, blueprint_of, family_of
from trainyard.models.base import TransformerStage
from trainyard.models.init import ParameterValues
from trainyard.models.module_factory import Fp8Layers
from trainyard.models.output import ModelOutput
from trainyard.models.rank_model import assign_parameters, build_model, fill_parameters, store_weights

__all__ = [
    "Batch",
    "Blueprint",
    "Family",
    "Fp8Layers",
    "ModelConfig",
    "ModelOutput",
    "ParameterValues",
    "TransformerStage",
    "assign_parameters",
    "blueprint_of",
    "build_model",
    "family_of",
    "fill_parameters",
    "store_weights",
]

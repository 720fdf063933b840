"""Model families, their parameter tables, and how to build one: `build_model`, then `fill_parameters`."""

from trainyard.core.batch import Batch
from trainyard.models.base import TransformerStage
from trainyard.models.blueprint import Blueprint
from trainyard.models.build import assign_parameters, build_model, fill_parameters
from trainyard.models.factory import Fp8Layers
from trainyard.models.families import FAMILIES, AnyModelConfig, Family, family_of
from trainyard.models.init import ParameterValues
from trainyard.models.output import ModelOutput

__all__ = [
    "FAMILIES",
    "AnyModelConfig",
    "Batch",
    "Blueprint",
    "Family",
    "Fp8Layers",
    "ModelOutput",
    "ParameterValues",
    "TransformerStage",
    "assign_parameters",
    "build_model",
    "family_of",
    "fill_parameters",
]

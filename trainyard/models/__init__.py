"""Model families by name, and how to build one: structure first (no memory), then values from anywhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainyard.config.model_schema import BertConfig, GptConfig, LlamaConfig
from trainyard.kernels.reference import Kernels
from trainyard.models import bert, gpt, llama
from trainyard.models.base import TransformerStage
from trainyard.models.blueprint import Blueprint
from trainyard.models.hf_names import HfNameMap
from trainyard.models.init import ParameterValues
from trainyard.models.layers import Batch, Fp8Layers, ModuleFactory
from trainyard.models.output import ModelOutput
from trainyard.parallel.layout import StageSpec
from trainyard.parallel.tensor_parallel import Axes

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

AnyModelConfig = LlamaConfig | GptConfig | BertConfig


@dataclass(frozen=True)
class Family:
    """A model family: one model, one blueprint, one name map."""

    module_class: Callable[[Any, ModuleFactory, Axes], TransformerStage]
    blueprint: Callable[[Any], Blueprint]
    hf_names: Callable[[Any], HfNameMap]


FAMILIES = {
    "llama": Family(llama.Llama, llama.blueprint, llama.hf_names),
    "gpt": Family(gpt.Gpt, gpt.blueprint, gpt.hf_names),
    "bert": Family(bert.Bert, bert.blueprint, bert.hf_names),
}


def family_of(c: AnyModelConfig) -> Family:
    return FAMILIES[c.family]


def build_model(
    c: AnyModelConfig,
    device: torch.device | str = "cpu",
    axes: Axes | None = None,
    stage: StageSpec | None = None,
    kernels: Kernels | None = None,
    fp8: Fp8Layers | None = None,
) -> TransformerStage:
    """The model of one rank, or a stage of it: structure and constants; parameters have shapes but no memory yet."""
    axes = axes or Axes()
    blueprint = family_of(c).blueprint(c)
    model = family_of(c).module_class(c, ModuleFactory(blueprint, axes, kernels or Kernels(), fp8), axes)
    if stage:
        model.prune_to_stage(stage, blueprint)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=False)
    return model


def assign_parameters(
    model: nn.Module, make_tensor: Callable[[str], torch.Tensor], existing: dict[str, nn.Parameter] | None = None
) -> dict[str, nn.Parameter]:
    """Put memory behind every parameter (a tied one stays one; those in `made` are taken from there). Returns them by
    name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    existing = dict(existing or {})
    for owner in list(model.modules()):
        for key, parameter in list(owner.named_parameters(recurse=False)):
            name = names[parameter]
            if name not in existing:
                existing[name] = nn.Parameter(make_tensor(name))
            owner.register_parameter(key, existing[name])
    return existing


def fill_parameters(model: nn.Module, values: ParameterValues, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Give every parameter its values, for use without an optimizer."""
    assign_parameters(model, lambda name: values(name).to(dtype))
    return model

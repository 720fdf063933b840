"""Model families by name, and how to build one: structure first (no memory), then values from anywhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainyard.config.model_schema import BertModel, GptModel, LlamaModel
from trainyard.kernels.reference import Kernels
from trainyard.models import bert, gpt, llama
from trainyard.models.base import Stack
from trainyard.models.blueprint import Blueprint
from trainyard.models.hf_names import Names
from trainyard.models.init import Values
from trainyard.models.layers import Batch, Fp8Blocks, Maker
from trainyard.models.output import Output
from trainyard.parallel.layout import Stage
from trainyard.parallel.tensor_parallel import Axes

__all__ = [
    "FAMILIES",
    "AnyModel",
    "Batch",
    "Blueprint",
    "Family",
    "Fp8Blocks",
    "Output",
    "Stack",
    "Values",
    "assign",
    "build",
    "family",
    "fill",
]

AnyModel = LlamaModel | GptModel | BertModel


@dataclass(frozen=True)
class Family:
    """A model family: one model, one blueprint, one name map."""

    model: Callable[[Any, Maker, Axes], Stack]
    blueprint: Callable[[Any], Blueprint]
    names: Callable[[Any], Names]


FAMILIES = {
    "llama": Family(llama.Llama, llama.blueprint, llama.names),
    "gpt": Family(gpt.Gpt, gpt.blueprint, gpt.names),
    "bert": Family(bert.Bert, bert.blueprint, bert.names),
}


def family(c: AnyModel) -> Family:
    return FAMILIES[c.family]


def build(
    c: AnyModel,
    device: torch.device | str = "cpu",
    axes: Axes | None = None,
    stage: Stage | None = None,
    kernels: Kernels | None = None,
    fp8: Fp8Blocks | None = None,
) -> Stack:
    """The model of one rank, or a stage of it: structure and constants; parameters have shapes but no memory yet."""
    axes = axes or Axes()
    blueprint = family(c).blueprint(c)
    model = family(c).model(c, Maker(blueprint, axes, kernels or Kernels(), fp8), axes)
    if stage:
        model.keep(stage, blueprint)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=False)
    return model


def assign(
    model: nn.Module, tensor: Callable[[str], torch.Tensor], made: dict[str, nn.Parameter] | None = None
) -> dict[str, nn.Parameter]:
    """Put memory behind every parameter (a tied one stays one; those in `made` are taken from there). Returns them by
    name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    made = dict(made or {})
    for owner in list(model.modules()):
        for key, parameter in list(owner.named_parameters(recurse=False)):
            name = names[parameter]
            if name not in made:
                made[name] = nn.Parameter(tensor(name))
            owner.register_parameter(key, made[name])
    return made


def fill(model: nn.Module, values: Values, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Give every parameter its values, for use without an optimizer."""
    assign(model, lambda name: values(name).to(dtype))
    return model

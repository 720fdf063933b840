"""A wrapper around linear layers from outside the package: a trained scale of each output, like IA3."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from trainyard import LinearWrapper
from trainyard.core.section import Section
from trainyard.families import ParamSpec
from trainyard.models.module_factory import ModuleFactory
from trainyard.parallel.tensor_parallel import Linear


class ScaleKeys(Section):
    start: float = 0.5
    """Initial value of the scales."""
    attention: bool = True
    """Scale the layers of attention, too."""


class ScaledLinear(Linear):
    """y = s (x W^T) + b."""

    def __init__(self, linear: Linear, make: ModuleFactory, name: str, options: ScaleKeys) -> None:
        super().__init__(linear.weight, linear.bias, linear.kernels, linear.fp8)
        self.scale: Parameter = make.parameter(f"{name}.scale")

    def forward(self, x: Tensor) -> Tensor:
        y = self.matmul(x)
        return y if self.bias is None else y + self.bias

    def matmul(self, x: Tensor) -> Tensor:
        return super().matmul(x) * self.scale.to(x.dtype)


class Scale(LinearWrapper):
    keys = ScaleKeys
    module = ScaledLinear

    def specs(self, options: Any, weight: ParamSpec) -> Sequence[ParamSpec]:
        if not options.attention and ".attention." in weight.name:
            return ()

        def name_of(text: str) -> str:
            return text.removesuffix("weight") + "scale"

        parts = tuple(replace(part, name=name_of(part.name)) for part in weight.fused_parts)
        # A row-parallel layer: each rank scales its part of the sum, and has a part of the gradient.
        split = {"tp_dim": 0, "fused_parts": parts} if weight.tp_dim == 0 else {"tp_gradient": "partial"}
        return [ParamSpec(name_of(weight.name), weight.shape[:1], init_value=options.start, **split)]  # type: ignore[arg-type]


WRAPPER = Scale()


def scaled(model: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The model section with scales."""
    return {**model, "linear": {"tests.support.scaled_linear:WRAPPER": options}}


def is_scaled(module: torch.nn.Module) -> bool:
    return any(isinstance(child, ScaledLinear) for child in module.modules())

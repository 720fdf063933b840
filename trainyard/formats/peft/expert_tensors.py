"""Adapters of experts in PEFT's folders, where all experts of a matrix have one A and one B (target_parameters).

transformers stacks the matrices of all experts in one parameter, with gate and up as one matrix. A has the rows of one
expert after the other. B, [out, rank x experts], has the first column of every expert, then the second of every expert;
ours has one expert after the other, because expert-parallel ranks hold ranges of experts.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from trainyard import models
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorIndex
from trainyard.families.registry import hf_names
from trainyard.formats.io.lazy_tensor import LazyTensor
from trainyard.formats.tensor_map import StoredTensor

TARGETS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
"""The parameters of transformers 5, in all families, that are adapted."""
SUFFIXES = {
    "gate_up_lora_A": ".base_layer.lora_A.weight",
    "gate_up_lora_B": ".base_layer.lora_B.weight",
    "down_lora_A": ".lora_A.weight",
    "down_lora_B": ".lora_B.weight",
}
"""What follows the name of the module of experts, by the last part of our names: PEFT wraps the module twice."""


def expert_parameters(model: models.ModelConfig) -> set[str]:
    """The stacked matrices of experts, by transformers' names; none where it has them transposed."""
    if _are_transposed(model):
        return set()
    blueprint = models.blueprint_of(model)
    names = (name for name in blueprint.parameter_names() if blueprint.spec(name).experts)
    return {f"model.{name}_proj" for name in names if "lora" not in name and not name.endswith("_bias")}


def expert_tensors(model: models.ModelConfig) -> Iterator[StoredTensor]:
    """The tensors of the adapters of experts, by the names of modules. Those with `stacked` are B."""
    blueprint = models.blueprint_of(model)
    for name in blueprint.parameter_names():
        module, _, kind = name.rpartition(".")
        if kind in SUFFIXES:
            if _are_transposed(model):
                raise UserError(f"model.family={model.family}: PEFT has another layout of adapters of its experts")
            stacked = blueprint.spec(name).experts if kind.endswith("B") else None
            slices = tuple(blueprint.local_slices(name))
            yield StoredTensor(f"model.{module}{SUFFIXES[kind]}", 0, slices, stacked=stacked)


def _are_transposed(model: models.ModelConfig) -> bool:
    """True if transformers has the matrices of experts as [in, out] (gpt-oss, Llama 4)."""
    return any(tensor.stacked and tensor.transposed for tensor in hf_names(model).table.values())


class StackedB(LazyTensor):
    """The B of each expert, [experts, out, rank], of a B in a file. It stays in memory once it was read: the elements
    of an expert are in all pages of the file."""

    def __init__(self, stored: LazyTensor, experts: int) -> None:
        self.stored, self.experts, self.dtype = stored, experts, stored.dtype
        fits = len(stored.shape) == 2 and stored.shape[1] % experts == 0
        self.shape = (experts, stored.shape[0], stored.shape[1] // experts) if fits else stored.shape

    @cached_property
    def _values(self) -> Tensor:
        return torch.unflatten(self.stored.read(), 1, (-1, self.experts)).permute(2, 0, 1).contiguous()

    def read_slice(self, index: TensorIndex) -> Tensor:
        return self._values[index]


def columns_of_b(stacked: Tensor) -> Tensor:
    """A B as files have it, [out, rank x experts], from the B of each expert."""
    return stacked.permute(1, 2, 0).flatten(1)

"""Weights and optimizer state from any source, addressed by slices of unfused, unsharded parameters under the
blueprint's names: what a native checkpoint and the formats of other systems have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trainyard import models
from trainyard.core.splits import FULL_MODEL, ModelShard
from trainyard.core.tensor_slice import TensorSlice
from trainyard.models.sharding import local_tensor


class WeightSource(Protocol):
    """Weights from any source, addressed by unfused parameter names. Nothing is read before `read` asks for it."""

    @property
    def model(self) -> models.ModelConfig: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, piece: TensorSlice) -> Tensor:
        """Return a slice of an unfused tensor in its stored dtype. It may be a read-only view of mapped memory."""
        ...


class BaseWeights(NamedTuple):
    """Where the weights come from that a run does not train, and that its checkpoints therefore do not hold."""

    location: str | None
    """A checkpoint of any format; None: they are initial values."""
    seed: int
    """Of the initial values, and of those that the checkpoint lacks."""


@dataclass(frozen=True)
class TrainingState:
    """Weights and, if there are any, optimizer moments, addressed by slices of unfused tensors."""

    model: models.ModelConfig
    dtypes: Mapping[str, torch.dtype]
    """The dtype of each kind of state, by the names of STATE_KINDS."""
    readers: Mapping[str, Callable[[TensorSlice], Tensor]]
    """Functions that read a slice of each kind of state. Weights that are not trained have no other state."""
    counters: Mapping[str, Any] = field(default_factory=dict)
    """The step, the number of updates and so on, as far as they are known."""

    def read(self, kind: str, piece: TensorSlice) -> Tensor:
        return self.readers[kind](piece).to(self.dtypes[kind])


@lru_cache(maxsize=8)
def unfused_tensors(model: models.ModelConfig) -> Mapping[str, TensorSlice]:
    """Every unfused tensor of the model, in full, by name, in the blueprint's order."""
    blueprint = models.blueprint_of(model)
    return {piece.name: piece for name in blueprint.parameter_names() for piece in blueprint.local_slices(name)}


@lru_cache(maxsize=8)
def frozen_tensors(model: models.ModelConfig) -> frozenset[str]:
    """The unfused tensors that are not trained."""
    blueprint = models.blueprint_of(model)
    frozen = (name for name in blueprint.parameter_names() if not blueprint.is_trained(name))
    return frozenset(piece.name for name in frozen for piece in blueprint.local_slices(name))


def local_values(weights: WeightSource, shard: ModelShard = FULL_MODEL) -> models.ParameterValues:
    """A function from parameter names to the fp32 values that a rank holds. It reads nothing else."""
    blueprint = models.blueprint_of(weights.model)
    return lambda name: local_tensor(blueprint, name, shard, lambda piece: weights.read(piece).float())

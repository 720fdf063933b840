"""The kinds of a model's layers. A plan traces one or two layers of each kind, which stand for all others."""

from collections.abc import Hashable
from functools import cache

from trainyard.config.schema import Config
from trainyard.families import ModelConfig
from trainyard.train.decisions import fp8_layer_range


@cache
def first_alike(model: ModelConfig, fp8_layers: range = range(0)) -> tuple[int, ...]:
    """For each layer the first one of its kind; in fp8 or not, layers are of different kinds."""
    first: dict[Hashable, int] = {}
    kinds = ((model.layer_kind(layer), layer in fp8_layers) for layer in range(model.layers))
    return tuple(first.setdefault(kind, layer) for layer, kind in enumerate(kinds))


def traced_alike(config: Config) -> tuple[int, ...]:
    """For each layer the first one that computes alike, under the configuration's precision."""
    return first_alike(config.model, fp8_layer_range(config.precision, config.model.layers))

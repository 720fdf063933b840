"""The parameters of a rank and their local shapes, from the blueprint, in the order of the flat buffer."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache

from trainyard.core.splits import ModelShard
from trainyard.families.blueprint import Blueprint, ParamSpec
from trainyard.models import ModelConfig, blueprint_of
from trainyard.parallel.layout import StageSpec


@dataclass(frozen=True)
class LocalParam:
    """A parameter on one rank; the same for all ranks and, inside blocks, for all layers of one kind."""

    spec: ParamSpec
    shape: tuple[int, ...]
    replication: tuple[tuple[int, int], ...]
    """(rows, ranks that hold the same rows) of each part of a fused parameter."""


@cache
def first_alike(model: ModelConfig, fp8_layers: range = range(0)) -> tuple[int, ...]:
    """For each layer the first one of its kind; in fp8 or not, layers are of different kinds. A plan traces one or two
    layers of each kind, which stand for all others. If the embedding is not trained, the first layer is of a kind of
    its own: its input has no gradient."""
    first: dict[Hashable, int] = {}
    apart = 0 if blueprint_of(model).trains_embedding else 1
    kinds = ((model.layer_kind(layer), layer in fp8_layers, layer < apart) for layer in range(model.layers))
    return tuple(first.setdefault(kind, layer) for layer, kind in enumerate(kinds))


def local_params(model: ModelConfig, shard: ModelShard, stages: list[StageSpec]) -> dict[str, LocalParam]:
    """The parameters of these stages by name, those with weight decay first. The vectors of a block may have another
    order than in the model; they are in the same buckets all the same."""
    params, alike = local_params_by_stage(model, shard), first_alike(model)
    named: dict[str, LocalParam] = {}
    for stage in stages:
        before = params["both"] * (stage.is_first or stage.is_last) + params["first"] * stage.is_first
        named |= {param.spec.name: param for param in before}
        for layer in stage.layers:
            named |= {param.spec.name.replace("*", str(layer)): param for param in params[alike[layer]]}
        named |= {param.spec.name: param for param in params["last"] * stage.is_last}
    return dict(sorted(named.items(), key=lambda item: not item[1].spec.weight_decay))


def shapes_and_specs(params: dict[str, LocalParam]) -> tuple[dict[str, tuple[int, ...]], dict[str, ParamSpec]]:
    """Local shapes and rows of the blueprint by name."""
    return {name: param.shape for name, param in params.items()}, {name: param.spec for name, param in params.items()}


@cache
def local_params_by_stage(model: ModelConfig, shard: ModelShard) -> dict[str | int, list[LocalParam]]:
    """Parameters outside the blocks by `ParamSpec.pipeline_stage`, those of blocks by the first layer of each kind."""
    blueprint = blueprint_of(model)
    params: dict[str | int, list[LocalParam]] = {"first": [], "last": [], "both": []}
    for spec in blueprint.specs:
        if spec.pipeline_stage != "block":
            params[spec.pipeline_stage].append(_local_param(blueprint, spec, spec.name, shard))
    for layer in dict.fromkeys(first_alike(model)):
        specs = blueprint.block_specs(layer)
        params[layer] = [_local_param(blueprint, spec, spec.name.replace("*", str(layer)), shard) for spec in specs]
    return params


def _local_param(blueprint: Blueprint, spec: ParamSpec, name: str, shard: ModelShard) -> LocalParam:
    shape = blueprint.local_shape(name, shard)
    replicas = blueprint.replication(name, shard)
    rows = [part.sizes[0] for part in blueprint.local_slices(name, shard)]
    if len(set(replicas)) == 1:
        replicas, rows = replicas[:1], [shape[0]]
    return LocalParam(spec, shape, tuple(zip(rows, replicas, strict=True)))

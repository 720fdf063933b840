"""The parameters of a rank and their local shapes, from the blueprint, in the order of the flat buffer."""

from dataclasses import dataclass
from functools import cache

from trainyard.config.schema import Config
from trainyard.core.splits import ModelShard
from trainyard.core.user_code import is_user_path
from trainyard.families.blueprint import Blueprint, ParamSpec
from trainyard.models import ModelConfig, blueprint_of
from trainyard.parallel.flat_buffer import FlatBuffer
from trainyard.parallel.layout import Layout, StageSpec
from trainyard.preflight.plan.layer_kinds import first_alike
from trainyard.train.optim.flat_state import make_flat_buffer
from trainyard.train.optim.load_rule import load_update_rule
from trainyard.train.optim.update_rule import UpdateRule


@dataclass(frozen=True)
class LocalParam:
    """A parameter on one rank; the same for all ranks and, inside blocks, for all layers of one kind."""

    spec: ParamSpec
    shape: tuple[int, ...]
    replication: tuple[tuple[int, int], ...]
    """(rows, ranks that hold the same rows) of each part of a fused parameter."""


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


def planned_rule(config: Config) -> UpdateRule:
    """The update rule that a plan counts: AdamW in the place of the user's, whose code a plan does not import."""
    rule = config.optimizer
    return load_update_rule(rule.model_copy(update={"kind": "adamw"}) if is_user_path(rule.kind) else rule)


def rank_flat_buffer(config: Config, params: dict[str, LocalParam], layout: Layout) -> FlatBuffer:
    """The flat buffer that a run lays out for `params`, which `local_params` returned."""
    shapes = {name: param.shape for name, param in params.items()}
    specs = {name: param.spec for name, param in params.items()}
    return make_flat_buffer(shapes, specs, layout, config.precision, planned_rule(config))


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

"""Which parameters a pipeline rank holds, with their local shapes, from the blueprint: in the order of its memory."""

from dataclasses import dataclass
from functools import cache

from trainyard.models import AnyModelConfig, family_of
from trainyard.models.blueprint import ParamSpec
from trainyard.parallel.layout import StageSpec


@dataclass(frozen=True)
class LocalParam:
    """A parameter as a tensor-parallel rank has it; the same for all ranks and, in blocks, for all layers."""

    spec: ParamSpec
    shape: tuple[int, ...]
    replication: tuple[tuple[int, int], ...]
    """Rows of each part, and how many ranks hold the same ones."""


def local_params(model: AnyModelConfig, tp: int, stages: list[StageSpec]) -> dict[str, LocalParam]:
    """All that these stages hold, by name, in the order of memory: those with weight decay first. (Vectors of a block
    may stand in another order than the model's own; they share their buckets all the same.)"""
    rows = local_params_by_stage(model, tp)
    found: dict[str, LocalParam] = {}
    for stage in stages:
        ends = rows["both"] * (stage.is_first or stage.is_last) + rows["first"] * stage.is_first
        inside = [(each.spec.name.replace("*", str(layer)), each) for layer in stage.layers for each in rows["block"]]
        before, after = ([(each.spec.name, each) for each in some] for some in (ends, rows["last"] * stage.is_last))
        found |= dict([*before, *inside, *after])
    return dict(sorted(found.items(), key=lambda item: not item[1].spec.weight_decay))


@cache
def local_params_by_stage(model: AnyModelConfig, tp: int) -> dict[str, list[LocalParam]]:
    """By place."""
    blueprint = family_of(model).blueprint(model)
    out: dict[str, list[LocalParam]] = {"first": [], "block": [], "last": [], "both": []}
    for row in blueprint.specs:
        name = row.name.replace("*", "0")
        shape = blueprint.local_shape(name, tp)
        holders = blueprint.replication(name, tp)
        parts = [part.stop - part.start for part in blueprint.tp_slices(name, tp)] if row.tp_dim == 0 else [shape[0]]
        out[row.pipeline_stage].append(LocalParam(row, shape, tuple(zip(parts, holders, strict=True))))
    return out

"""Initial weights do not depend on the layout or on what is fused."""

import pytest
import torch

from tests.support import configs
from trainyard import models
from trainyard.models.blueprint import Blueprint, FusedPart, ParamSpec
from trainyard.models.init import initial_values


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_ranks_hold_slices_of_the_whole(family: str, tp: int) -> None:
    section = configs.tiny_config(family).model
    blueprint = models.family_of(section).blueprint(section)
    whole = initial_values(blueprint, 3)
    for name in blueprint.parameter_names():
        row = blueprint.spec(name)
        ranks = [initial_values(blueprint, 3, tp=tp, rank=rank)(name) for rank in range(tp)]
        assert all(tuple(value.shape) == blueprint.local_shape(name, tp, rank) for rank, value in enumerate(ranks))
        pieces = {part.name: [] for part in row.fused_parts} if row.fused_parts else {row.name: []}
        dim = row.tp_dim or 0
        for rank, value in enumerate(ranks):
            start = 0
            for pattern, held in zip(pieces, blueprint.tp_slices(name, tp, rank), strict=True):
                size = held.sizes[dim]
                pieces[pattern].append((held.offsets[dim], value.narrow(dim, start, size)))
                start += size
        parts = []
        for found in pieces.values():
            distinct = dict(found)  # copies of a kv head start at the same place
            assert all(torch.equal(distinct[start], value) for start, value in found)
            parts.append(torch.cat([distinct[start] for start in sorted(distinct)], dim))
        assert torch.equal(torch.cat(parts, 0 if row.fused_parts else dim), whole(name)), name


def test_fusing_does_not_change_weights() -> None:
    values = {}
    for fused in (True, False):
        section = configs.tiny_config({**configs.LLAMA, "fuse_qkv": fused, "fuse_gate_up": fused}).model
        values[fused] = initial_values(models.family_of(section).blueprint(section), 0)
    fused, apart = values[True], values[False]
    assert torch.equal(
        fused("layers.1.attention.qkv.weight"), torch.cat([apart(f"layers.1.attention.{x}.weight") for x in "qkv"])
    )
    assert torch.equal(
        fused("layers.0.mlp.gate_up.weight"), torch.cat([apart(f"layers.0.mlp.{x}.weight") for x in ("gate", "up")])
    )


def test_names_and_seeds_matter() -> None:
    section = configs.tiny_config().model
    blueprint = models.family_of(section).blueprint(section)
    a, b = initial_values(blueprint, 0), initial_values(blueprint, 1)
    name = "layers.{}.mlp.down.weight"
    assert not torch.equal(a(name.format(0)), a(name.format(1)))
    assert not torch.equal(a(name.format(0)), b(name.format(0)))
    assert torch.equal(a(name.format(0)), a(name.format(0)))


def test_standard_deviations_follow_the_blueprint() -> None:
    section = configs.tiny_config({**configs.LLAMA, "hidden": 256, "ffn": 512, "layers": 8}).model
    blueprint = models.family_of(section).blueprint(section)
    values = initial_values(blueprint, 0)
    assert values("layers.0.attention.qkv.weight").std() == pytest.approx(0.02, rel=0.02)
    assert values("layers.0.mlp.down.weight").std() == pytest.approx(0.02 / 4, rel=0.02)
    assert torch.equal(values("norm.weight"), torch.ones(256))


def test_kv_heads_are_copied_when_ranks_outnumber_them() -> None:
    row = ParamSpec("k", (8, 3), 0, (FusedPart("k", 8, 2),), init_std=1.0)
    blueprint = Blueprint((row,), 1)
    starts = [blueprint.tp_slices("k", 4, rank)[0].offsets[0] for rank in range(4)]
    assert starts == [0, 0, 4, 4]
    assert blueprint.local_shape("k", 4) == (4, 3)

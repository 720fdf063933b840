"""Initial weights do not depend on the layout or on fusion."""

import pytest
import torch

from tests.support import configs
from trainyard import models
from trainyard.core.splits import ModelShard
from trainyard.families.blueprint import Blueprint, FusedPart, ParamSpec
from trainyard.models.init import initial_values
from trainyard.models.sharding import shard_tensor, unshard_tensor


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_ranks_hold_slices_of_the_full_tensors(family: str, tp: int) -> None:
    section = configs.tiny_config(family).model
    blueprint = models.family_of(section).blueprint(section)
    full = initial_values(blueprint, 3)
    for name in blueprint.parameter_names():
        spec = blueprint.spec(name)
        shards = [initial_values(blueprint, 3, shard=ModelShard(tp, rank))(name) for rank in range(tp)]
        shapes = [blueprint.local_shape(name, ModelShard(tp, rank)) for rank in range(tp)]
        assert [tuple(shard.shape) for shard in shards] == shapes
        pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
        dim = spec.tp_dim or 0
        for rank, shard in enumerate(shards):
            start = 0
            for piece in blueprint.local_slices(name, ModelShard(tp, rank)):
                size = piece.sizes[dim]
                pieces.setdefault(piece.name, []).append((piece.offsets[dim], shard.narrow(dim, start, size)))
                start += size
        parts = []
        for offsets_and_values in pieces.values():
            by_offset = dict(offsets_and_values)  # replicas of a kv head have the same offset
            assert all(torch.equal(by_offset[offset], value) for offset, value in offsets_and_values)
            parts.append(torch.cat([by_offset[offset] for offset in sorted(by_offset)], dim))
        assert torch.equal(torch.cat(parts, 0 if spec.fused_parts else dim), full(name)), name
        assert torch.equal(unshard_tensor(blueprint, name, shards), full(name)), name
        for rank, shard in enumerate(shards):
            assert torch.equal(shard_tensor(blueprint, name, full(name), ModelShard(tp, rank)), shard), name


def test_fusion_does_not_change_weights() -> None:
    values = {}
    for fuse in (True, False):
        section = configs.tiny_config({**configs.LLAMA, "fuse_qkv": fuse, "fuse_gate_up": fuse}).model
        values[fuse] = initial_values(models.family_of(section).blueprint(section), 0)
    fused, unfused = values[True], values[False]
    assert torch.equal(
        fused("layers.1.attention.qkv.weight"), torch.cat([unfused(f"layers.1.attention.{x}.weight") for x in "qkv"])
    )
    assert torch.equal(
        fused("layers.0.mlp.gate_up.weight"), torch.cat([unfused(f"layers.0.mlp.{x}.weight") for x in ("gate", "up")])
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


def test_kv_heads_are_replicated_if_ranks_outnumber_them() -> None:
    spec = ParamSpec("k", (8, 3), 0, (FusedPart("k", 8, 2),), init_std=1.0)
    blueprint = Blueprint((spec,), 1)
    starts = [blueprint.local_slices("k", ModelShard(4, rank))[0].offsets[0] for rank in range(4)]
    assert starts == [0, 0, 4, 4]
    assert blueprint.local_shape("k", ModelShard(4)) == (4, 3)

"""Layouts: rank arithmetic, stages, and every rule with its one-line error and the nearest valid layouts."""

from itertools import product
from math import prod
from typing import Any

import pytest

from tests.support import configs
from trainyard.config.load import load
from trainyard.config.recipes import recipe_names
from trainyard.config.smoke import fit_to_ranks, smoke_config
from trainyard.core.errors import UserError
from trainyard.core.splits import head_range, replication_factor
from trainyard.parallel.layout import Layout

MOE = configs.MOE
MODEL = {**configs.LLAMA, "layers": 6, "heads": 8, "kv_heads": 4, "hidden": 64, "ffn": 96}


def config(layout: dict[str, Any], model: dict[str, Any] = MODEL, **sections: dict[str, Any]) -> Any:
    return configs.tiny_config(model, **{"train": {"global_batch": 8, "micro_batch": 1}, **sections}, layout=layout)


def test_ranks_are_pp_dp_cp_tp_with_tp_fastest() -> None:
    layout = Layout.from_config(config({"tp": 2, "pp": 2, "cp": 2}), 16)
    assert (layout.dp, layout.micro_batches) == (2, 4)
    assert layout.groups("tp")[:2] == [[0, 1], [2, 3]]
    assert layout.groups("cp")[0] == [0, 2]
    assert layout.groups("dp")[0] == [0, 4]
    assert layout.groups("pp")[0] == [0, 8]
    assert layout.groups("dp", "cp")[1] == [1, 3, 5, 7]
    assert layout.coords(13) == {"pp": 1, "dp": 1, "cp": 0, "tp": 1}


def test_experts_are_divided_among_adjacent_data_and_context_ranks() -> None:
    layout = Layout.from_config(config({"tp": 2, "cp": 2, "ep": 4}, MOE), 16)
    assert layout.expert_groups()[:2] == [[0, 2, 4, 6], [8, 10, 12, 14]]
    assert layout.expert_data_groups()[:2] == [[0, 8], [2, 10]]
    assert layout.model_shard(13) == (2, 1, 4, 2)
    assert layout.data_shard(13, of_experts=False) == (8, 6)
    assert layout.data_shard(13, of_experts=True) == (2, 1)


def test_every_rank_is_in_one_group_per_axis() -> None:
    for tp, pp, cp, dp in product((1, 2, 4), (1, 2, 3), (1, 2, 4), (1, 2, 4)):
        world_size = tp * pp * cp * dp
        layout = Layout(tp, pp, cp, dp)
        for axes in (("tp",), ("cp",), ("pp",), ("dp", "cp"), ("dp", "cp", "tp"), ("pp", "dp", "cp", "tp")):
            groups = layout.groups(*axes)
            assert sorted(rank for group in groups for rank in group) == list(range(world_size))
            assert {len(group) for group in groups} == {prod(getattr(layout, axis) for axis in axes)}


VIOLATIONS = [
    # layout, ranks, other sections, part of the error
    ({"tp": 3}, 3, {}, "layout.tp=3: does not divide model.heads=8"),
    ({"pp": 8}, 8, {}, "layout.pp=8: pp x vpp = 8 stages for 6 layers"),
    ({"pp": 2, "vpp": 4}, 2, {}, "pp x vpp = 8 stages for 6 layers"),
    ({"pp": 2, "pipeline_cuts": (5,)}, 2, {}, "layout.pipeline_cuts=[5]: the model's 6 layers are 0 to 5"),
    ({"cp": 2}, 2, {"data": {"seq_len": 18}}, "layout.cp=2: data.seq_len=18 is not a multiple of 2 x cp = 4"),
    ({"tp": 4, "sequence_parallel": True}, 4, {"data": {"seq_len": 18}}, "data.seq_len / cp = 18 / 1 divisible by tp"),
    ({"tp": 2, "pp": 2}, 6, {}, "needs a multiple of 4 ranks, this run has 6 (use --nproc 4 or 8"),
    ({}, 3, {}, "train.global_batch=8: not a multiple of micro_batch x data parallel = 1 x 3 (use 6 or 9)"),
    ({"ep": 2}, 2, {}, "layout.ep=2: model.family=llama has no experts (use 1)"),
    ({"pp": 2, "vpp": 2}, 2, {"train": {"global_batch": 5, "micro_batch": 1}}, "5 cannot be split that way (use 4)"),
]


@pytest.mark.parametrize(("layout", "ranks", "sections", "message"), VIOLATIONS)
def test_a_violated_rule_is_one_line(layout: Any, ranks: int, sections: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        Layout.from_config(config(layout, **sections), ranks)
    line = str(error.value)
    assert message in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("layout", "ranks", "message"),
    [
        ({"ep": 3}, 3, "layout.ep=3: does not divide model.experts=4 (use 1)"),
        ({"ep": 4}, 2, "layout.ep=4: does not divide data x context parallel = 2 x 1 (use 1 or 2)"),
        ({"ep": 2, "tp": 2}, 2, "layout.ep=2: does not divide data x context parallel = 1 x 1 (use 1)"),
    ],
)
def test_ep_must_divide_experts_and_ranks(layout: dict[str, int], ranks: int, message: str) -> None:
    with pytest.raises(UserError) as error:
        Layout.from_config(config(layout, MOE, train={"global_batch": 12}), ranks)
    assert message in str(error.value)


def test_tp_must_divide_ffn() -> None:
    with pytest.raises(UserError, match=r"layout\.tp=8: does not divide model\.ffn=100"):
        Layout.from_config(config({"tp": 8}, {**MODEL, "ffn": 100}), 8)


@pytest.mark.parametrize(
    ("layout", "ranks"), [({"tp": 3}, 6), ({"tp": 16}, 16), ({"cp": 3, "tp": 2}, 6), ({"tp": 5}, 8)]
)
def test_suggested_layouts_are_valid(layout: dict[str, Any], ranks: int) -> None:
    sections = {"train": {"global_batch": 48, "micro_batch": 1}, "data": {"seq_len": 64}}
    with pytest.raises(UserError) as error:
        Layout.from_config(config(layout, **sections), ranks)
    suggestions = str(error.value).partition(f"nearest on {ranks} ranks: ")[2].split(", ")
    assert 1 <= len(suggestions) <= 3
    for suggestion in suggestions:
        sizes = {key: int(size) for key, size in (word.split("=") for word in suggestion.split(" (")[0].split())}
        assert Layout.from_config(config(sizes, **sections), ranks).world_size == ranks


def test_stages_cover_the_layers_and_spare_the_ends() -> None:
    stages = Layout.from_config(config({"pp": 4}), 4).stages
    assert [list(stage.layers) for stage in stages] == [[0], [1, 2], [3, 4], [5]]
    assert [stage.is_first for stage in stages] == [True, False, False, False]
    assert [stage.is_last for stage in stages] == [False, False, False, True]
    cut = Layout.from_config(config({"pp": 3, "pipeline_cuts": (0, 3)}), 3).stages
    assert [list(stage.layers) for stage in cut] == [[0], [1, 2, 3], [4, 5]]


def test_virtual_stages_in_rounds_or_in_a_v() -> None:
    rounds = Layout.from_config(config({"pp": 3, "vpp": 2}, train={"global_batch": 6}), 3)
    assert [rounds.stage_owner(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    v_shape = Layout.from_config(config({"pp": 3, "vpp": 2, "pipeline_schedule": "zbv"}, train={"global_batch": 6}), 3)
    assert [v_shape.stage_owner(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [stage.index for stage in v_shape.stages_on(0)] == [0, 5]


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_every_rank_has_the_kv_heads_of_its_queries(kv_heads: int, tp: int) -> None:
    heads = kv_heads * tp  # a number of heads that tp divides
    ranges = [head_range(kv_heads, tp, rank) for rank in range(tp)]
    assert len({end - first for first, end in ranges}) == 1
    for rank, (first, end) in enumerate(ranges):
        for query in range(rank * heads // tp, (rank + 1) * heads // tp):
            assert first <= query // (heads // kv_heads) < end
    for head in range(kv_heads):
        replicas = [rank for rank, (first, end) in enumerate(ranges) if first <= head < end]
        assert len(replicas) == replication_factor(kv_heads, tp)
        assert replicas == list(range(replicas[0], replicas[0] + len(replicas)))


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_are_valid_as_written_and_in_smoke_size(name: str) -> None:
    recipe = load(name)
    if recipe.layout.ranks:
        assert Layout.from_config(recipe, recipe.layout.ranks).world_size == recipe.layout.ranks
    for ranks in (1, 2, 4, 8):
        assert Layout.from_config(smoke_config(recipe, ranks), ranks).world_size == ranks


def test_smoke_size_keeps_every_axis_that_fits() -> None:
    small = smoke_config(load("llama3-70b"), 8).layout
    assert (small.tp, small.pp, small.cp, small.zero) == (2, 2, 1, 1)  # and dp 2
    small = smoke_config(load("llama3-70b-cp"), 8).layout
    assert (small.tp, small.pp, small.cp) == (2, 2, 2)
    assert fit_to_ranks(load("llama2-7b"), 8).layout.tp == 4
    assert fit_to_ranks(load("llama2-7b"), 8).model == load("llama2-7b").model

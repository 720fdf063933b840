"""Whole runs on several ranks: evaluation, own losses, saved weights, stopping, skipping, compiling."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support import configs
from tests.support.pool import Pool, RankDied, RankFailed
from trainyard.compat import supports_unsorted_groups
from trainyard.devices.neuron.topology import rank_order

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (8, {"tp": 2, "pp": 2, "zero": 1, "sequence_parallel": True}),
    (4, {"cp": 2, "zero": 3}),
    (4, {"pp": 2, "vpp": 2, "tp": 2}),
]


def configure(tmp_path: Path, family: str, layout: dict[str, Any], **sections: dict[str, Any]) -> Any:
    base: dict[str, Any] = {
        "train": {"global_batch": 8, "micro_batch": 1, "steps": 4},
        "optimizer": {"eps": 1e-3},
        "data": {"validation_fraction": 2e-6},  # 34 samples: the last batch is not full
        "evaluate": {"every": 4},
        "checkpoint": {"export_hf": True},
        "log": {"directory": str(tmp_path), "name": f"{family}-{len(layout)}"},
        "layout": layout,
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    return configs.tiny_config({**configs.TINY_MODELS[family], "layers": 4}, **merged)


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
@pytest.mark.parametrize(("family", "own"), [("gpt", False), ("gpt", True), ("bert", False)])
def test_a_run_is_the_run_of_one_rank(
    pool: Pool, tmp_path: Path, family: str, own: bool, ranks: int, layout: dict[str, Any]
) -> None:
    alone = pool.run("tests.distributed.rank_jobs:run", (configure(tmp_path, family, {}), own), 1)[0]
    found = pool.run("tests.distributed.rank_jobs:run", (configure(tmp_path, family, layout), own), ranks)
    assert {result["directory"] for result in found} == {found[0]["directory"]}
    for result in found:  # every rank knows the same
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert result["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-5)
    ours, theirs = (load_file(Path(each["directory"]) / "model" / "model.safetensors") for each in (found[0], alone))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() <= 1e-5 * max(tensor.abs().max(), 1e-3), name


def test_all_ranks_stop_at_the_same_step_when_one_is_asked(pool: Pool, tmp_path: Path) -> None:
    config = configure(tmp_path, "llama", {"pp": 2}, train={"steps": 1000}, checkpoint={"export_hf": False})
    found = pool.run("tests.distributed.rank_jobs:stopped_on_one_rank", (config, 1, 3), 4)
    assert [result["steps"] for result in found] == [3] * 4
    assert all(result["interrupted"] for result in found)


def test_what_is_not_finite_is_named_wherever_it_is(pool: Pool, tmp_path: Path) -> None:
    config = configure(tmp_path, "llama", {"pp": 2}, train={"max_skipped_steps": 2})
    found = pool.run("tests.distributed.rank_jobs:poisoned", (config, "layers.3.mlp.down.weight"), 2)
    for line in found:  # the first stage says it too
        assert "step 2: 2 steps in a row were not finite" in line
        assert "gradient of " in line
        assert "layers.3.mlp.down.weight" in line or "more" in line


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("sequence", [False, True])
def test_blocks_compile_without_breaks_into_one_graph_on_all_ranks(pool: Pool, family: str, sequence: bool) -> None:
    layout = {"tp": 2, "sequence_parallel": sequence}
    config = configs.tiny_config({**configs.TINY_MODELS[family], "layers": 4}, layout=layout)
    found = pool.run("tests.distributed.rank_jobs:graphs", (config,), 2)
    assert [result["breaks"] for result in found] == [0, 0]
    assert [len(result["graphs"]) for result in found] == [1, 1]  # one graph for all four blocks
    assert found[0]["graphs"] == found[1]["graphs"]  # and the same on every rank
    assert found[0]["collectives"] == 4  # into and out of attention and MLP
    assert found[0]["losses"] == pytest.approx(found[0]["eager"], rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt", "bert"])
def test_sequence_parallel_ranks_keep_no_whole_activation(pool: Pool, family: str) -> None:
    """What a column-split product gathers is gathered again in backward."""
    model = {**configs.TINY_MODELS[family], "ffn": 96}  # half of it is not the hidden size
    config = configs.tiny_config(model, layout={"tp": 2, "sequence_parallel": True})
    shapes = pool.run("tests.distributed.rank_jobs:kept", (config,), 2)[0]
    batch, tokens, hidden = config.train.micro_batch, config.data.seq_len, config.model.hidden
    assert (batch, tokens // 2, hidden) in shapes
    assert (batch, tokens, hidden) not in shapes


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [{"tp": 2, "sequence_parallel": True}, {"zero": 3}, {"pp": 2}, {"cp": 2}], ids=str)
def test_a_compiled_run_on_two_ranks(pool: Pool, tmp_path: Path, layout: dict[str, Any]) -> None:
    sections: dict[str, Any] = {
        "compile": {"enabled": True},
        "checkpoint": {"export_hf": False},
        "evaluate": {"every": 0},
    }
    alone = pool.run("tests.distributed.rank_jobs:run", (configure(tmp_path, "llama", {}, **sections), False), 1)[0]
    found = pool.run("tests.distributed.rank_jobs:run", (configure(tmp_path, "llama", layout, **sections), False), 2)
    assert found[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def test_ranks_in_another_order(pool: Pool) -> None:
    """As on an instance where tensor-parallel ranks are not neighbours."""
    layout = {"tp": 4, "zero": 1, "sequence_parallel": True}
    config = configs.tiny_config(layout=layout, optimizer={"eps": 1e-3})
    job = ("tests.distributed.rank_jobs:reordered", (config, [0, 1, 6, 7, 2, 3, 4, 5]), 8)
    if not supports_unsorted_groups():
        with pytest.raises(RankFailed, match=r"needs torch 2\.13"):
            pool.run(*job)
        return
    assert pool.run(*job)[0] == []


def test_every_fourth_rank_together_on_any_torch(pool: Pool) -> None:
    """As trn1 has it for tp=4, with torch 2.9: every group that gathers or scatters is in the order of its numbers."""
    order = rank_order("trn1", 1, 4, 32)
    assert order[:6] == [0, 8, 16, 24, 1, 9]
    few = [order[place] // 4 for place in range(32) if order[place] % 4 == 0]
    assert few == [0, 2, 4, 6, 1, 3, 5, 7]
    for layout in ({"tp": 4, "zero": 1, "sequence_parallel": True}, {"tp": 4, "pp": 2}):
        config = configs.tiny_config(layout=layout, optimizer={"eps": 1e-3})
        assert pool.run("tests.distributed.rank_jobs:reordered", (config, few, False), 8)[0] == []


def test_the_pool_tells_what_failed(pool: Pool) -> None:
    with pytest.raises(RankFailed, match="needs a multiple of 3 ranks"):
        pool.run(
            "tests.distributed.rank_jobs:run",
            (configs.tiny_config(layout={"pp": 3}, model={**configs.LLAMA, "layers": 3}), False),
            2,
        )


def test_a_crash_of_a_rank_shows_where_it_was(pool: Pool) -> None:
    with pytest.raises(RankDied, match=r"rank 1's process died with exit code -6; (.|\n)*in abort_on_rank_1"):
        pool.run("tests.distributed.rank_jobs:abort_on_rank_1", (), 2)

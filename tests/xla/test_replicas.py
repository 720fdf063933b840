"""Tensor, context, expert and data parallel ranks with XLA's collectives compute the same step as one rank."""

from typing import Any

import pytest

from tests.support import configs
from tests.xla import steps
from tests.xla.conftest import RunIsolated
from tests.xla.replicas import VARIABLES

RANKS = 4
# Shards of a fused matrix contain rows of different projections, so ranks would trace different updates; replicas of
# one process must run the same graph.
MODEL = {**configs.LLAMA, "fuse_qkv": False}
EXPERTS = {**configs.MOE, "fuse_qkv": False, "capacity_factor": 0.75}


@pytest.mark.parametrize(
    ("layout", "model", "graphs"),
    [
        ({"tp": 2, "zero": 0, "sequence_parallel": False}, MODEL, [2] * steps.STEPS),
        # The all-gather of new weights overlaps the next step; the first step has none in flight.
        ({"tp": 2, "zero": 1, "sequence_parallel": True}, MODEL, [2, *[3] * (steps.STEPS - 1)]),
        ({"cp": 2, "zero": 0}, MODEL, [2] * steps.STEPS),
        ({"cp": 2, "tp": 2, "zero": 0, "sequence_parallel": True}, MODEL, [2] * steps.STEPS),
        ({"ep": 2, "tp": 2, "zero": 0, "sequence_parallel": True}, EXPERTS, [2] * steps.STEPS),
        ({"ep": 4, "cp": 2, "zero": 0}, EXPERTS, [2] * steps.STEPS),
    ],
    ids=["sums", "sequence parallel and shards", "context", "context and tensor", "experts and tensor", "experts"],
)
def test_four_ranks_equal_one(
    layout: dict[str, int], model: dict[str, Any], graphs: list[int], run_isolated: RunIsolated
) -> None:
    data_parallel = RANKS // (layout.get("tp", 1) * layout.get("cp", 1))
    sections = {
        "layout": layout,
        "train": {
            "global_batch": 4,
            "micro_batch": 4 // data_parallel,
        },  # one micro batch per step: a second has its own graph
        "recompute": {"kind": "selective", "modules": ["core_attention", "mlp"]},
    }
    differences = run_isolated(steps.compare_replicas, RANKS, model, sections, CPU_NUM_DEVICES=str(RANKS), **VARIABLES)
    assert len(differences) == RANKS
    for difference in differences:
        assert difference.losses < 1e-5
        assert difference.norms < 1e-5
        assert difference.weights < 1e-5
        assert not difference.fallbacks
    # Rank 0 compiles for all; graphs that another rank compiled would be counted here too.
    assert differences[0].graphs == graphs

"""Tensor, context and data parallel ranks through XLA's collectives make the step of one rank."""

import pytest

from tests.support import configs
from tests.xla import steps
from tests.xla.conftest import Apart
from tests.xla.replicas import VARIABLES

RANKS = 4
# A shard of a fused matrix has rows of other parts than the next one, so that ranks would trace different updates;
# replicas of one process must run the same graph.
MODEL = {**configs.LLAMA, "fuse_qkv": False}


@pytest.mark.parametrize(
    ("layout", "graphs"),
    [
        ({"tp": 2, "zero": 0, "sequence_parallel": False}, [2] * steps.STEPS),
        # New weights travel while the next step begins: the first step has none on their way.
        ({"tp": 2, "zero": 1, "sequence_parallel": True}, [2, *[3] * (steps.STEPS - 1)]),
        ({"cp": 2, "zero": 0}, [2] * steps.STEPS),
        ({"cp": 2, "tp": 2, "zero": 0, "sequence_parallel": True}, [2] * steps.STEPS),
    ],
    ids=["sums", "sequence parallel and shards", "context", "context and tensor"],
)
def test_two_by_two_ranks_are_one(layout: dict[str, int], graphs: list[int], apart: Apart) -> None:
    data_parallel = RANKS // (layout.get("tp", 1) * layout.get("cp", 1))
    sections = {
        "layout": layout,
        "train": {"global_batch": 4, "micro_batch": 4 // data_parallel},  # one a step: a second has a graph of its own
        "recompute": {"kind": "selective", "modules": ["core_attention", "mlp"]},
    }
    found = apart(steps.replicated, RANKS, MODEL, sections, CPU_NUM_DEVICES=str(RANKS), **VARIABLES)
    assert len(found) == RANKS
    for each in found:
        assert each.losses < 1e-5
        assert each.norms < 1e-5
        assert each.weights < 1e-5
        assert not each.fallbacks
    # Rank 0 compiles for all: whatever another one compiled would be counted here too.
    assert found[0].graphs == graphs

"""The full-size 70B recipe lowered by XLA: all ranks of a stage share one graph, with the collectives that plan
predicts."""

from collections import Counter

import pytest

from tests.xla.conftest import RunIsolated
from tests.xla.lowering import VARIABLES, CollectiveOp, LoweredGraph, lower
from trainyard.config.load import load
from trainyard.config.schema import Config
from trainyard.devices.neuron.xla_device import XlaDevice
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.time.comm_volume import MessageCounts, step_messages

RECIPE = "llama3-70b"
STAGE_RANKS = 64
"""Ranks of each of the eight stages: tp 32 times dp 2."""
STAGES = {
    "first": (0, 5, 63),
    "middle": (STAGE_RANKS, STAGE_RANKS + 33, 2 * STAGE_RANKS - 1, 6 * STAGE_RANKS + 7),  # stages 1 and 6 are equal
    "last": (7 * STAGE_RANKS, 7 * STAGE_RANKS + 17, 8 * STAGE_RANKS - 1),
}


@pytest.fixture(scope="module")
def graphs(run_isolated: RunIsolated) -> dict[int, LoweredGraph]:
    ranks = [rank for ranks_ in STAGES.values() for rank in ranks_]
    return dict(zip(ranks, run_isolated(lower, load(RECIPE, []), ranks, **VARIABLES), strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_of_a_stage_share_one_graph(stage: str, graphs: dict[int, LoweredGraph]) -> None:
    assert len({graphs[rank].digest for rank in STAGES[stage]}) == 1


def test_stages_differ(graphs: dict[int, LoweredGraph]) -> None:
    assert len({graphs[ranks[0]].digest for ranks in STAGES.values()}) == len(STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_collectives_equal_the_planned_messages(stage: str, graphs: dict[int, LoweredGraph]) -> None:
    rank = STAGES[stage][0]
    # Pipeline sends happen between graphs.
    expected = {
        CollectiveOp(message.kind, message.dtype, message.nbytes, message.group_size): times
        for message, times in micro_batch(rank).items()
        if message.group != "pp"
    }
    assert sum(expected.values()) >= 100
    assert graphs[rank].collectives == expected


def test_replica_groups_equal_the_layout(graphs: dict[int, LoweredGraph]) -> None:
    config = load(RECIPE, [])
    groups = Layout.from_config(config, 8 * STAGE_RANKS).groups("tp")
    text = ",".join("{" + ",".join(map(str, ranks)) + "}" for ranks in groups)
    assert all(graph.groups == {text} for graph in graphs.values())


def micro_batch(rank: int) -> MessageCounts:
    """Messages that one more micro batch adds to a step."""

    def step(micro_batches: int) -> MessageCounts:
        config = with_micro_batches(micro_batches)
        layout = Layout.from_config(config, 8 * STAGE_RANKS)
        return step_messages(PlannedRun(config, layout, XlaDevice.kind), rank)

    return Counter(step(9)) - Counter(step(8))


def with_micro_batches(count: int) -> Config:
    return load(RECIPE, [f"train.global_batch={2 * count}"])

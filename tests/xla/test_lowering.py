"""The 70B recipe at full size, as XLA sees it: one graph for all ranks of a stage, and in it the messages we derive."""

from collections import Counter

import pytest

from tests.xla.conftest import Apart
from tests.xla.lowering import VARIABLES, Crossing, Lowered, lower
from trainyard.config.load import load
from trainyard.config.schema import Config
from trainyard.devices.neuron.xla_device import XlaDevice
from trainyard.parallel.layout import Layout
from trainyard.plan.time.comm_volume import MessageCounts, step_messages

RECIPE = "llama3-70b"
STAGE = 64
"""Ranks of one of its eight stages: 32 share each matrix, and there are two of these."""
STAGES = {
    "first": (0, 5, 63),
    "middle": (STAGE, STAGE + 33, 2 * STAGE - 1, 6 * STAGE + 7),  # stages 1 and 6 are alike
    "last": (7 * STAGE, 7 * STAGE + 17, 8 * STAGE - 1),
}


@pytest.fixture(scope="module")
def graphs(apart: Apart) -> dict[int, Lowered]:
    ranks = [rank for each in STAGES.values() for rank in each]
    return dict(zip(ranks, apart(lower, load(RECIPE, []), ranks, **VARIABLES), strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_of_a_stage_have_one_graph(stage: str, graphs: dict[int, Lowered]) -> None:
    assert len({graphs[rank].digest for rank in STAGES[stage]}) == 1


def test_stages_differ(graphs: dict[int, Lowered]) -> None:
    assert len({graphs[ranks[0]].digest for ranks in STAGES.values()}) == len(STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_collectives_are_the_messages_of_a_micro_batch(stage: str, graphs: dict[int, Lowered]) -> None:
    rank = STAGES[stage][0]
    # What stages send each other is sent between graphs.
    expected = {
        Crossing(message.kind, message.dtype, message.nbytes, message.group_size): times
        for message, times in micro_batch(rank).items()
        if message.group != "pp"
    }
    assert sum(expected.values()) >= 100
    assert graphs[rank].crossings == expected


def test_groups_are_those_of_the_layout(graphs: dict[int, Lowered]) -> None:
    config = load(RECIPE, [])
    lists = Layout.from_config(config, 8 * STAGE).groups("tp")
    shown = ",".join("{" + ",".join(map(str, ranks)) + "}" for ranks in lists)
    assert all(graph.groups == {shown} for graph in graphs.values())


def micro_batch(rank: int) -> MessageCounts:
    """What one more micro batch adds to a step."""

    def step(micro_batches: int) -> MessageCounts:
        config = with_micro_batches(micro_batches)
        return step_messages(config, Layout.from_config(config, 8 * STAGE), rank, XlaDevice.max_logits_bytes)

    return Counter(step(9)) - Counter(step(8))


def with_micro_batches(count: int) -> Config:
    return load(RECIPE, [f"train.global_batch={2 * count}"])

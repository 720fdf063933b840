"""Rank order and group rules of Trainium instances."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainyard.core.errors import UserError
from trainyard.devices.neuron.topology import (
    CORES_PER_INSTANCE,
    group_problem,
    rank_flops,
    rank_memory_bytes,
    rank_order,
)


def groups(order: list[int], tp: int) -> list[list[int]]:
    return [order[first : first + tp] for first in range(0, len(order), tp)]


def test_trn1_groups_of_four_are_every_eighth_core() -> None:
    problem = groups(rank_order("trn1", 1, 4, 64), 4)
    assert problem[:2] == [[0, 8, 16, 24], [1, 9, 17, 25]]
    assert problem[8] == [32, 40, 48, 56]


def test_trn2_groups_of_32_are_outer_and_inner_rows() -> None:
    first, second = groups(rank_order("trn2", 2, 32, 64), 32)
    assert first == [*range(16), *range(48, 64)]
    assert second == [*range(16, 32), *range(32, 48)]
    outer = groups(rank_order("trn2", 1, 64, 128), 64)[0]
    assert outer == [*range(32), *range(96, 128)]


@pytest.mark.parametrize(
    ("generation", "lnc", "tp", "ranks"),
    [("trn1", 1, 8, 32), ("trn1", 1, 32, 512), ("trn2", 2, 4, 64), ("trn2", 2, 64, 128), ("trn3", 2, 8, 64)],
)
def test_other_sizes_use_consecutive_cores(generation: str, lnc: int, tp: int, ranks: int) -> None:
    assert rank_order(generation, lnc, tp, ranks) == list(range(ranks))


@pytest.mark.parametrize(("generation", "lnc", "tp"), [("trn1", 1, 4), ("trn2", 2, 32), ("trn2", 1, 64)])
def test_rank_order_is_a_permutation(generation: str, lnc: int, tp: int) -> None:
    assert sorted(rank_order(generation, lnc, tp, 256)) == list(range(256))


def test_unsupported_layouts_are_errors() -> None:
    with pytest.raises(UserError, match=r"layout\.tp=8: not supported on trn2 with LNC 2; nearest: 4 or 16"):
        rank_order("trn2", 2, 8, 64)
    with pytest.raises(UserError, match="trn9 with LNC 1: not supported"):
        rank_order("trn9", 1, 8, 64)


@pytest.mark.parametrize(
    ("generation", "lnc", "kind", "teraflops"),
    [("trn1", 1, "bf16", 95), ("trn2", 2, "bf16", 166.75), ("trn2", 1, "fp8", 162.375), ("trn3", 2, "fp32", 45.75)],
)
def test_rank_flops(generation: str, lnc: int, kind: str, teraflops: float) -> None:
    assert rank_flops(generation, lnc, kind) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    ("generation", "lnc", "gibibytes"), [("trn1", 1, 16), ("trn2", 2, 24), ("trn2", 1, 12), ("trn3", 2, 36)]
)
def test_rank_memory(generation: str, lnc: int, gibibytes: int) -> None:
    assert rank_memory_bytes(generation, lnc) == gibibytes << 30


@pytest.mark.parametrize(
    ("generation", "lnc", "kind", "ranks"),
    [
        ("trn1", 1, "all_reduce", [5]),
        ("trn1", 1, "all_reduce", range(2, 4)),
        ("trn1", 1, "all_gather", range(8, 16)),
        ("trn1", 1, "all_reduce", range(1, 32, 8)),  # tp=4
        ("trn1", 1, "all_reduce", range(32, 64)),
        ("trn1", 1, "all_reduce", range(512)),
        ("trn1", 1, "all_reduce", range(7, 96, 32)),  # one core of each of three instances
        ("trn1", 1, "all_reduce", [*range(8), *range(32, 40)]),
        ("trn2", 2, "reduce_scatter", [*range(16), *range(48, 64)]),  # rows 0 and 3
        ("trn2", 2, "all_reduce", range(3, 64, 4)),  # data parallel next to tp=4
        ("trn2", 1, "all_reduce", range(8)),
        ("trn2", 2, "all_to_all", range(16)),
        ("trn2", 2, "send", [0, 37]),
        ("trn3", 2, "all_reduce", range(8)),
        ("trn3", 2, "all_to_all", range(64)),
    ],
)
def test_supported_groups(generation: str, lnc: int, kind: str, ranks: range | list[int]) -> None:
    assert group_problem(generation, lnc, kind, ranks) is None


@pytest.mark.parametrize(
    ("generation", "lnc", "kind", "ranks", "message"),
    [
        ("trn1", 1, "all_reduce", range(4), "4 consecutive ranks: unsupported on trn1; nearest: every 8th core"),
        ("trn1", 1, "all_reduce", range(24), "24 ranks on an instance: a group has 1, 2, 4, 8, 16 or a multiple of 32"),
        ("trn1", 1, "all_to_all", range(1, 32, 8), "every 8th core: all_to_all on trn1 needs consecutive cores"),
        ("trn2", 2, "all_reduce", range(8), "8 consecutive ranks: unsupported on trn2 with LNC 2; nearest: 4 or 16"),
        ("trn2", 1, "all_reduce", range(16), "16 consecutive ranks: unsupported on trn2 with LNC 1; nearest: 8 or 32"),
        ("trn2", 2, "all_reduce", range(2, 6), "4 consecutive ranks from 2: not aligned; nearest: from 0 or 4"),
        ("trn2", 2, "all_to_all", range(2), "2 ranks: all_to_all needs 4, 8, 16 or a multiple of 32"),
        ("trn2", 2, "all_reduce", [0, 1, 2, 5], "the ranks are not evenly spaced; nearest: consecutive ranks"),
        ("trn1", 1, "all_reduce", [0, 1, 32, 35], "instances participate with different cores; nearest: the same"),
        ("trn1", 1, "all_reduce", [31, 32], "instances participate with different cores; nearest: the same"),
    ],
)
def test_unsupported_groups(generation: str, lnc: int, kind: str, ranks: range | list[int], message: str) -> None:
    problem = group_problem(generation, lnc, kind, ranks)
    assert problem is not None
    assert message in problem


@given(
    machine=st.sampled_from([*CORES_PER_INSTANCE]),
    tp=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    instances=st.sampled_from([1, 2, 8]),
)
def test_rank_order_makes_supported_groups(machine: tuple[str, int], tp: int, instances: int) -> None:
    """Tensor and data parallel groups of every supported layout."""
    generation, lnc = machine
    assume(tp <= CORES_PER_INSTANCE[machine])
    try:
        order = rank_order(generation, lnc, tp, CORES_PER_INSTANCE[machine] * instances)
    except UserError:
        return
    for group in [*groups(order, tp), *(order[position::tp] for position in range(tp))]:
        assert group_problem(generation, lnc, "all_reduce", group) is None, group


def test_unknown_collective_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="shout: not one of all_reduce"):
        group_problem("trn1", 1, "shout", [0, 1])

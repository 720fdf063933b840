"""Group shapes of Trainium instances, as the runtime wants them."""

import pytest

from trainyard.devices.trainium import rank_order
from trainyard.errors import UserError


def groups(order: list[int], tp: int) -> list[list[int]]:
    return [order[first : first + tp] for first in range(0, len(order), tp)]


def test_trn1_groups_of_four_are_every_eighth_core() -> None:
    found = groups(rank_order("trn1", 1, 4, 64), 4)
    assert found[:2] == [[0, 8, 16, 24], [1, 9, 17, 25]]
    assert found[8] == [32, 40, 48, 56]


def test_trn2_groups_of_32_are_outer_and_inner_rows() -> None:
    first, second = groups(rank_order("trn2", 2, 32, 64), 32)
    assert first == [*range(16), *range(48, 64)]
    assert second == [*range(16, 32), *range(32, 48)]
    outer = groups(rank_order("trn2", 1, 64, 128), 64)[0]
    assert outer == [*range(32), *range(96, 128)]


@pytest.mark.parametrize(
    ("generation", "lnc", "tp", "ranks"),
    [("trn1", 1, 8, 32), ("trn1", 1, 32, 512), ("trn2", 2, 4, 64), ("trn2", 2, 64, 128)],
)
def test_all_others_are_neighbours(generation: str, lnc: int, tp: int, ranks: int) -> None:
    assert rank_order(generation, lnc, tp, ranks) == list(range(ranks))


@pytest.mark.parametrize(("generation", "lnc", "tp"), [("trn1", 1, 4), ("trn2", 2, 32), ("trn2", 1, 64)])
def test_every_core_has_one_place(generation: str, lnc: int, tp: int) -> None:
    assert sorted(rank_order(generation, lnc, tp, 256)) == list(range(256))


def test_what_the_runtime_refuses_is_one_line() -> None:
    with pytest.raises(UserError, match=r"layout\.tp=8: not supported on trn2 with LNC 2; nearest: 4 or 16"):
        rank_order("trn2", 2, 8, 64)
    with pytest.raises(UserError, match="trn9 with LNC 1: not known"):
        rank_order("trn9", 1, 8, 64)

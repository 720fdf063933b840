"""Parametrize a test over all combinations of several axes; the fast tier runs a covering subset.

A pairwise cover has every pair of values of any two axes in some test case: bugs that need three particular values at
once are rare. The other combinations are nightly, except on a GPU, where a kernel takes milliseconds.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch


def pairwise(**axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize by name: values, or a mapping from ids to values."""
    named = {name: _with_ids(values) for name, values in axes.items()}
    cases = list(product(*(range(len(values)) for values in named.values())))
    fast = _cover(cases)
    params = []
    for case in cases:
        chosen = [list(values.items())[index] for values, index in zip(named.values(), case, strict=True)]
        marks = () if case in fast or torch.cuda.is_available() else (pytest.mark.nightly,)
        params.append(pytest.param(*(value for _, value in chosen), id="-".join(key for key, _ in chosen), marks=marks))
    return pytest.mark.parametrize(tuple(named), params)


def _with_ids(values: Sequence[Any] | Mapping[str, Any]) -> Mapping[str, Any]:
    return values if isinstance(values, Mapping) else {str(value).removeprefix("torch."): value for value in values}


def _cover(cases: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Greedily choose cases until every pair of values is covered."""

    def pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
        return set(combinations(enumerate(case), 2)) if len(case) > 1 else {((0, case[0]), (0, case[0]))}

    missing = set().union(*(pairs(case) for case in cases))
    chosen: set[tuple[int, ...]] = set()
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.add(best)
        missing -= pairs(best)
    return chosen

"""Parametrize a test over all combinations of several axes; the fast tier runs a covering subset.

A pairwise cover has every pair of values of any two axes in some test case: bugs that need three particular values at
once are rare. Slow tests have every value of every axis in some case. The other combinations are nightly, except on a
GPU, where a kernel takes milliseconds.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch


def pairwise(**axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize by name: values, or a mapping from ids to values."""
    return _parametrize(2, axes)


def each_value(**axes: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Like `pairwise`, for tests that take a second: the fast tier has every value of every axis, not every pair."""
    return _parametrize(1, axes)


def _parametrize(strength: int, axes: Mapping[str, Sequence[Any] | Mapping[str, Any]]) -> pytest.MarkDecorator:
    named = {name: _with_ids(values) for name, values in axes.items()}
    cases = list(product(*(range(len(values)) for values in named.values())))
    fast = _cover(cases, min(strength, len(named)))
    params = []
    for case in cases:
        chosen = [list(values.items())[index] for values, index in zip(named.values(), case, strict=True)]
        marks = () if case in fast or torch.cuda.is_available() else (pytest.mark.nightly,)
        params.append(pytest.param(*(value for _, value in chosen), id="-".join(key for key, _ in chosen), marks=marks))
    return pytest.mark.parametrize(tuple(named), params)


def _with_ids(values: Sequence[Any] | Mapping[str, Any]) -> Mapping[str, Any]:
    return values if isinstance(values, Mapping) else {str(value).removeprefix("torch."): value for value in values}


def _cover(cases: list[tuple[int, ...]], strength: int) -> set[tuple[int, ...]]:
    """Greedily choose cases until every combination of values of any `strength` axes is covered."""

    def combined_values(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(case), strength))

    missing = set().union(*(combined_values(case) for case in cases))
    chosen: set[tuple[int, ...]] = set()
    while missing:
        best = max(cases, key=lambda case: len(combined_values(case) & missing))
        chosen.add(best)
        missing -= combined_values(best)
    return chosen

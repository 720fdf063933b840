"""Slices of logical tensors: their index, and the elements that two of them share."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from trainyard.core.tensor_slice import TensorSlice


@st.composite
def slice_pairs(draw: st.DrawFn) -> tuple[TensorSlice, TensorSlice]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))

    def random_slice() -> TensorSlice:
        piece = TensorSlice.full("w", shape)
        for dim, size in enumerate(shape):
            start = draw(st.integers(0, size - 1))
            piece = piece.narrow(dim, start, draw(st.integers(start + 1, size)))
        return piece

    return random_slice(), random_slice()


@given(slice_pairs())
@examples(200)
def test_intersection_has_the_elements_of_both_slices(pair: tuple[TensorSlice, TensorSlice]) -> None:
    a, b = pair
    marks = torch.zeros(a.global_shape, dtype=torch.int32)
    marks[a.to_index()] += 1
    marks[b.to_index()] += 1
    assert int((marks > 0).sum()) + int((marks == 2).sum()) == a.numel + b.numel
    common = a.intersect(b)
    if common is None:
        assert not (marks == 2).any()
        return
    assert common == b.intersect(a)
    expected = torch.zeros_like(marks)
    expected[common.to_index()] = 1
    assert torch.equal(expected, (marks == 2).int())
    local = torch.arange(marks.numel()).view(marks.shape)[a.to_index()]
    full = torch.arange(marks.numel()).view(marks.shape)[common.to_index()]
    assert torch.equal(local[common.to_index(a.offsets)], full)

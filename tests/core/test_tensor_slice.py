"""Intersections and indices of TensorSlice agree with boolean masks over the full tensor."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from trainyard.core.tensor_slice import TensorSlice


@st.composite
def two_slices(draw: st.DrawFn) -> tuple[TensorSlice, TensorSlice]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))

    def one() -> TensorSlice:
        piece = TensorSlice.full("w", shape)
        for dim, size in enumerate(shape):
            start = draw(st.integers(0, size))
            piece = piece.narrow(dim, start, draw(st.integers(start, size)))
        return piece

    return one(), one()


def mask(piece: TensorSlice) -> np.ndarray:
    out = np.zeros(piece.global_shape, dtype=bool)
    out[piece.to_index()] = True
    return out


@examples(300)
@given(two_slices())
def test_intersection_is_the_overlap_of_both_masks(slices: tuple[TensorSlice, TensorSlice]) -> None:
    a, b = slices
    overlap = a.intersect(b)
    expected = mask(a) & mask(b)
    assert a.numel == mask(a).sum()
    assert (overlap is None) == (not expected.any())
    if overlap:
        assert np.array_equal(mask(overlap), expected)
        assert overlap == b.intersect(a)


@examples(300)
@given(two_slices())
def test_an_index_relative_to_a_slice_selects_the_same_elements(slices: tuple[TensorSlice, TensorSlice]) -> None:
    a, b = slices
    full = np.arange(np.prod(a.global_shape)).reshape(a.global_shape)
    if overlap := a.intersect(b):
        inside_a = full[a.to_index()][overlap.to_index(a.offsets)]
        assert np.array_equal(inside_a, full[overlap.to_index()])

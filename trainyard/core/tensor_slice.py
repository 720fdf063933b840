"""A rectangular slice of a tensor, in the vocabulary of torch.distributed.checkpoint.

The blueprint says which slices a tensor-parallel rank holds, the native checkpoint which slices each file holds, and a
foreign format which slices each of its tensors is made of. All of them use this one type, so that reading a tensor at
another layout is always the same question: where do two slices overlap?
"""

from dataclasses import dataclass
from math import prod

TensorIndex = tuple[slice, ...]
"""An index for `tensor[...]`: a slice with start and stop for each dim."""


@dataclass(frozen=True)
class TensorSlice:
    """Elements [offsets, offsets + sizes) of the tensor `name`, whose full shape is `global_shape`."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def full(cls, name: str, shape: tuple[int, ...]) -> "TensorSlice":
        return TensorSlice(name, shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def narrow(self, dim: int, start: int, stop: int) -> "TensorSlice":
        """This slice with [start, stop) along `dim`, counted in the full tensor."""
        offsets = (*self.offsets[:dim], start, *self.offsets[dim + 1 :])
        sizes = (*self.sizes[:dim], stop - start, *self.sizes[dim + 1 :])
        return TensorSlice(self.name, self.global_shape, offsets, sizes)

    def intersect(self, other: "TensorSlice") -> "TensorSlice | None":
        """The elements that are in both slices of one tensor; None if there are none."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        stops = (
            min(a + size_a, b + size_b)
            for a, size_a, b, size_b in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return TensorSlice(self.name, self.global_shape, starts, sizes) if min(sizes, default=1) > 0 else None

    def to_index(self, origin: tuple[int, ...] | None = None) -> TensorIndex:
        """The index of this slice in the full tensor, or in a tensor whose first element has the offsets `origin`."""
        origin = origin or (0,) * len(self.offsets)
        return tuple(
            slice(offset - first, offset - first + size)
            for offset, size, first in zip(self.offsets, self.sizes, origin, strict=True)
        )

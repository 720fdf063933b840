"""The flat buffer layout: where each parameter of a rank lies in one contiguous buffer, and in each ZeRO shard of it.

Shards split a parameter by rows (dim 0): shard k of n has rows [k c, (k + 1) c), c = ceil(rows / n). Communication
happens in buckets of adjacent parameters (parallel/zero1.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from trainyard.core.splits import shard_rows

ALIGN_ELEMENTS = 64
"""Every view starts at a multiple of this, which is 128 bytes or more."""


@dataclass(frozen=True)
class ParamSpan:
    """Location of one parameter in the full buffer and in a shard."""

    name: str
    shape: tuple[int, ...]
    start: int
    """First element in the full buffer."""
    shard_start: int
    """First element in a shard."""
    num_shards: int
    shard_rows: int
    """Rows per shard."""
    of_experts: bool = False
    """The parameter belongs to experts that other ranks hold than those that hold the same other parameters."""

    @property
    def row_size(self) -> int:
        """Elements per row."""
        return prod(self.shape[1:])

    @property
    def shard_numel(self) -> int:
        """Elements per shard, padding of the last shards included."""
        return self.shard_rows * self.row_size


@dataclass(frozen=True)
class Bucket:
    """Adjacent parameters that are communicated together."""

    spans: tuple[ParamSpan, ...]
    full_range: slice
    """Its elements in the full buffer."""
    shard_range: slice
    """Its elements in a shard."""

    @property
    def num_shards(self) -> int:
        return self.spans[0].num_shards

    @property
    def of_experts(self) -> bool:
        return self.spans[0].of_experts

    @property
    def shard_elements(self) -> int:
        return self.shard_range.stop - self.shard_range.start

    @property
    def padded_elements(self) -> int:
        """Elements with the shards padded to one size."""
        return self.shard_elements * self.num_shards


class FlatBuffer:
    """The layout of the buffer; the memory itself belongs to the optimizer."""

    def __init__(
        self,
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        num_decayed: int,
        num_shards: int,
        bucket_elements: int,
        num_undecayed: int | None = None,
        expert_shards: Mapping[str, int] | None = None,
    ) -> None:
        """The first `num_decayed` parameters have weight decay, the next `num_undecayed` (default: all others) have
        none, the rest are a third group with a separate update rule. `expert_shards` has the number of shards of the
        parameters of experts where they differ from the others. No bucket spans two groups, or experts and others. A
        bucket has at most `bucket_elements` elements of the full buffer, or a single parameter."""
        expert_shards = expert_shards or {}
        self.num_shards = num_shards
        """Shards of every parameter except those of `expert_shards`."""
        self.spans: dict[str, ParamSpan] = {}
        self.buckets: list[Bucket] = []
        self.size = self.shard_size = 0
        group_ends = (num_decayed, len(shapes) if num_undecayed is None else num_decayed + num_undecayed)
        shard_starts: list[int] = []
        spans: list[ParamSpan] = []

        def close_bucket() -> None:
            if spans:
                full_range = slice(spans[0].start, self.size)
                shard_range = slice(spans[0].shard_start, self.shard_size)
                self.buckets.append(Bucket(tuple(spans), full_range, shard_range))
                spans.clear()

        for index, (name, shape) in enumerate(shapes):
            of_experts, shards = name in expert_shards, expert_shards.get(name, num_shards)
            if (
                index in group_ends
                or (spans and spans[0].of_experts != of_experts)
                or (spans and self.size + prod(shape) - spans[0].start > bucket_elements)
            ):
                close_bucket()
            shard_starts.append(self.shard_size)
            rows = -(-shape[0] // shards)
            span = ParamSpan(name, shape, self.size, self.shard_size, shards, rows, of_experts)
            self.spans[name] = span
            spans.append(span)
            self.size += _align(prod(shape))
            self.shard_size += _align(span.shard_numel)
        close_bucket()
        shard_starts.append(self.shard_size)
        self.shard_decay_end, self.shard_undecayed_end = (shard_starts[min(end, len(shapes))] for end in group_ends)

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """A parameter in the full buffer."""
        span = self.spans[name]
        return buffer[span.start : span.start + prod(span.shape)].view(span.shape)

    def shard_row_range(self, name: str, shard: int) -> range:
        """The rows of a parameter that a shard has; the last shards of a short parameter have none."""
        return shard_rows(self.spans[name].shape[0], self.spans[name].num_shards, shard)

    def shard_view(self, buffer: Tensor, name: str, shard: int) -> Tensor:
        """A parameter's rows in the buffer of a shard."""
        span, rows = self.spans[name], len(self.shard_row_range(name, shard))
        return buffer[span.shard_start : span.shard_start + rows * span.row_size].view(rows, *span.shape[1:])

    def scatter_to_shards(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> None:
        """Copy a bucket from the full buffer into `out` [its shards, elements of the bucket in a shard]."""
        for full_view, shard_view in _matching_views(bucket, buffer, out):
            shard_view.copy_(full_view)

    def gather_from_shards(self, bucket: Bucket, shards: Tensor, buffer: Tensor) -> None:
        """The inverse of `scatter_to_shards`."""
        for full_view, shard_view in _matching_views(bucket, buffer, shards):
            full_view.copy_(shard_view)


def _matching_views(bucket: Bucket, buffer: Tensor, shards: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of views with the same elements of a bucket, in the full buffer and in the shards: for each parameter its
    full shards, and then a shorter last one."""
    for span in bucket.spans:
        start, length = span.shard_start - bucket.shard_range.start, span.shard_numel
        values, views = buffer[span.start : span.start + prod(span.shape)], shards[:, start : start + length]
        full_shards, rest = divmod(len(values), length)
        yield values[: full_shards * length].view(full_shards, length), views[:full_shards]
        if rest:
            yield values[-rest:], views[full_shards, :rest]


def _align(count: int) -> int:
    return -(-count // ALIGN_ELEMENTS) * ALIGN_ELEMENTS

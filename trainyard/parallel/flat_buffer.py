"""The flat buffer layout: where each parameter of a rank lies in one contiguous buffer, and in each ZeRO shard of it.

Shards split a parameter by rows (dim 0): shard k of n has rows [k c, (k + 1) c), c = ceil(rows / n). Communication
happens in buckets of adjacent parameters (parallel/zero1.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from trainyard.parallel.layout import shard_rows

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
    shard_rows: int
    """Rows per shard."""

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


class FlatBuffer:
    """The layout of the buffer; the memory itself belongs to the optimizer."""

    def __init__(
        self,
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        num_decayed: int,
        num_shards: int,
        bucket_elements: int,
        num_undecayed: int | None = None,
    ) -> None:
        """The first `num_decayed` parameters have weight decay, the next `num_undecayed` (default: all others) have
        none, the rest are a third group with a separate update rule. No bucket spans two groups. A bucket has at most
        `bucket_elements` elements of the full buffer, or a single parameter."""
        self.num_shards = num_shards
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
            if index in group_ends or (spans and self.size + prod(shape) - spans[0].start > bucket_elements):
                close_bucket()
            shard_starts.append(self.shard_size)
            span = ParamSpan(name, shape, self.size, self.shard_size, -(-shape[0] // num_shards))
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
        return shard_rows(self.spans[name].shape[0], self.num_shards, shard)

    def shard_view(self, buffer: Tensor, name: str, shard: int) -> Tensor:
        """A parameter's rows in the buffer of a shard."""
        span, rows = self.spans[name], len(self.shard_row_range(name, shard))
        return buffer[span.shard_start : span.shard_start + rows * span.row_size].view(rows, *span.shape[1:])

    def scatter_to_shards(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> None:
        """Copy a bucket from the full buffer into `out` [num_shards, elements of the bucket in a shard]."""
        for span, shards in self._shard_views(bucket, out):
            values = buffer[span.start : span.start + prod(span.shape)]
            full_shards = len(values) // span.shard_numel
            shards[:full_shards].copy_(values[: full_shards * span.shard_numel].view(full_shards, span.shard_numel))
            if rest := len(values) - full_shards * span.shard_numel:
                shards[full_shards, :rest].copy_(values[-rest:])

    def gather_from_shards(self, bucket: Bucket, shards: Tensor, buffer: Tensor) -> None:
        """The inverse of `scatter_to_shards`."""
        for span, views in self._shard_views(bucket, shards):
            values = buffer[span.start : span.start + prod(span.shape)]
            full_shards = len(values) // span.shard_numel
            values[: full_shards * span.shard_numel].view(full_shards, span.shard_numel).copy_(views[:full_shards])
            if rest := len(values) - full_shards * span.shard_numel:
                values[-rest:].copy_(views[full_shards, :rest])

    def _shard_views(self, bucket: Bucket, shards: Tensor) -> Iterable[tuple[ParamSpan, Tensor]]:
        for span in bucket.spans:
            start = span.shard_start - bucket.shard_range.start
            yield span, shards[:, start : start + span.shard_numel]


def _align(count: int) -> int:
    return -(-count // ALIGN_ELEMENTS) * ALIGN_ELEMENTS

"""All parameters of a rank in one long row of memory, and how data-parallel ranks share it (ZeRO-1).

A parameter's rows (dim 0) are dealt out in equal chunks: shard k of n has rows [k c, (k + 1) c), c = ceil(rows / n).
What ranks exchange goes in buckets of neighbouring parameters, a few at a time:

- gradients, when the last micro batch has filled a bucket, while the backward pass goes on with the layers below it;
- new weights, in the order in which the next forward pass meets them, while it is already under way.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from trainyard.parallel.layout import shard_rows
from trainyard.parallel.process_group import Group, wait

ALIGN_ELEMENTS = 64
"""Elements: views start at multiples of 128 bytes or more."""
MAX_IN_FLIGHT = 2
"""Buckets under way at a time: enough to overlap, and it bounds what their copies take."""


@dataclass(frozen=True)
class ParamSpan:
    """Where a parameter lies."""

    name: str
    shape: tuple[int, ...]
    start: int
    """First element in the whole row."""
    shard_start: int
    """First element in a shard of it."""
    shard_rows: int
    """Rows of one shard."""

    @property
    def row_size(self) -> int:
        return prod(self.shape[1:])

    @property
    def shard_numel(self) -> int:
        return self.shard_rows * self.row_size


@dataclass(frozen=True)
class Bucket:
    spans: tuple[ParamSpan, ...]
    full_range: slice
    shard_range: slice


class FlatBuffer:
    """The plan of the memory. Parameters before and after `split` never share a bucket."""

    def __init__(
        self, shapes: Sequence[tuple[str, tuple[int, ...]]], num_decayed: int, num_shards: int, bucket_elements: int
    ) -> None:
        """`bucket` in elements of the whole row."""
        self.num_shards = num_shards
        self.spans: dict[str, ParamSpan] = {}
        self.buckets: list[Bucket] = []
        self.size = self.shard_size = self.shard_decay_end = 0
        spans: list[ParamSpan] = []

        def close() -> None:
            if spans:
                begin, at = spans[0].start, spans[0].shard_start
                self.buckets.append(Bucket(tuple(spans), slice(begin, self.size), slice(at, self.shard_size)))
                spans.clear()

        for number, (name, shape) in enumerate(shapes):
            if number == num_decayed or (spans and self.size + prod(shape) - spans[0].start > bucket_elements):
                close()
            if number == num_decayed:
                self.shard_decay_end = self.shard_size
            span = ParamSpan(name, shape, self.size, self.shard_size, -(-shape[0] // num_shards))
            self.spans[name] = span
            spans.append(span)
            self.size += _aligned(prod(shape))
            self.shard_size += _aligned(span.shard_numel)
        close()
        if num_decayed >= len(shapes):
            self.shard_decay_end = self.shard_size

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """A parameter in the whole row."""
        span = self.spans[name]
        return buffer[span.start : span.start + prod(span.shape)].view(span.shape)

    def shard_row_range(self, name: str, shard: int) -> range:
        """Which of a parameter's rows a shard has (none, for the last shards of a short one)."""
        return shard_rows(self.spans[name].shape[0], self.num_shards, shard)

    def shard_view(self, buffer: Tensor, name: str, shard: int) -> Tensor:
        """A parameter's rows in a shard's row of memory."""
        span, rows = self.spans[name], len(self.shard_row_range(name, shard))
        return buffer[span.shard_start : span.shard_start + rows * span.row_size].view(rows, *span.shape[1:])

    def scatter_to_shards(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> None:
        """From the whole row to shards one after the other: out is [shards, length of the bucket's shard]."""
        for span, mine in self._shard_views(bucket, out):
            values = buffer[span.start : span.start + prod(span.shape)]
            full = len(values) // span.shard_numel
            mine[:full].copy_(values[: full * span.shard_numel].view(full, span.shard_numel))
            if rest := len(values) - full * span.shard_numel:
                mine[full, :rest].copy_(values[-rest:])

    def gather_from_shards(self, bucket: Bucket, shards: Tensor, buffer: Tensor) -> None:
        """The other way."""
        for span, mine in self._shard_views(bucket, shards):
            values = buffer[span.start : span.start + prod(span.shape)]
            full = len(values) // span.shard_numel
            values[: full * span.shard_numel].view(full, span.shard_numel).copy_(mine[:full])
            if rest := len(values) - full * span.shard_numel:
                values[-rest:].copy_(mine[full, :rest])

    def _shard_views(self, bucket: Bucket, shards: Tensor) -> Iterable[tuple[ParamSpan, Tensor]]:
        for span in bucket.spans:
            at = span.shard_start - bucket.shard_range.start
            yield span, shards[:, at : at + span.shard_numel]


class GradientReducer:
    """Sums gradients over the ranks of `group`: the whole row where every rank updates everything (flat.shards is 1),
    else each rank its shard."""

    def __init__(
        self, flat: FlatBuffer, group: Group, gradients: Tensor, reduced_grads: Tensor, dtype: torch.dtype
    ) -> None:
        """`dtype` is what travels. `sums` is where the result goes: `gradients` itself when nothing is sharded."""
        self.flat, self.group = flat, group
        self.gradients, self.reduced_grads, self.dtype = gradients, reduced_grads, dtype
        self.bucket_index = {span.name: number for number, bucket in enumerate(flat.buckets) for span in bucket.spans}
        self.pending_grads: list[int] = []
        self.started: set[int] = set()
        self.in_flight: deque[tuple[Bucket, Tensor]] = deque()

    def begin_step(self, micro_batches: int) -> None:
        """Before a step: each gradient will arrive so many times (once for each micro batch)."""
        self.pending_grads = [micro_batches * len(bucket.spans) for bucket in self.flat.buckets]
        self.started.clear()

    def on_grad_ready(self, name: str) -> None:
        number = self.bucket_index[name]
        self.pending_grads[number] -= 1
        if self.pending_grads[number] == 0:
            self._start_bucket(number)

    def finish(self) -> None:
        """After the last backward pass: whatever has not been sent yet, and wait for all."""
        for number in reversed(range(len(self.flat.buckets))):
            self._start_bucket(number)
        while self.in_flight:
            self._complete()

    def _start_bucket(self, index: int) -> None:
        if index in self.started or self.group.size == 1:
            return
        self.started.add(index)
        bucket = self.flat.buckets[index]
        if len(self.in_flight) == MAX_IN_FLIGHT:
            self._complete()
        if self.flat.num_shards == 1:
            mine = self.gradients[bucket.full_range]
            self.in_flight.append((bucket, self.group.start_all_reduce_(mine.to(self.dtype))))
            return
        length = bucket.shard_range.stop - bucket.shard_range.start
        dealt = self.gradients.new_zeros(self.flat.num_shards, length, dtype=self.dtype)
        self.flat.scatter_to_shards(bucket, self.gradients, dealt)
        self.in_flight.append((bucket, self.group.start_reduce_scatter(dealt.view(-1))))

    def _complete(self) -> None:
        bucket, tensor = self.in_flight.popleft()
        total = wait(tensor)
        if self.flat.num_shards > 1:
            self.reduced_grads[bucket.shard_range].copy_(total)
        elif self.dtype != self.reduced_grads.dtype:  # else it was summed in place
            self.reduced_grads[bucket.full_range].copy_(total)


class WeightGatherer:
    """Brings every rank's shard of new weights to all, in the order in which they are used."""

    def __init__(
        self, flat: FlatBuffer, group: Group, weights: Tensor, needed_at: Callable[[str], Iterable[str]]
    ) -> None:
        """`used` names the moments at which a parameter is needed, such as a layer's number."""
        self.flat, self.group, self.weights = flat, group, weights
        # Norms and biases are few, at the end of memory, and needed from the start.
        small = [bucket for bucket in flat.buckets if bucket.shard_range.start >= flat.shard_decay_end]
        self.buckets = small + [bucket for bucket in flat.buckets if bucket.shard_range.start < flat.shard_decay_end]
        self.buckets_needed: dict[str, int] = {}
        for place, bucket in enumerate(self.buckets):
            for span in bucket.spans:
                for moment in needed_at(span.name):
                    self.buckets_needed[moment] = max(self.buckets_needed.get(moment, 0), place + 1)
        self.shard: Tensor | None = None
        self.started = self.completed = len(self.buckets)
        self.in_flight: deque[Tensor] = deque()

    def start(self, shard: Tensor) -> None:
        """New weights of this rank's shard are there. They must not change before all have landed."""
        self.shard = shard
        self.started = self.completed = 0
        self._start_next()

    def wait_for(self, moment: str) -> None:
        """Wait for what is used at this moment."""
        self._complete(self.buckets_needed.get(moment, 0))

    def wait_all(self) -> None:
        """Wait for everything."""
        self._complete(len(self.buckets))

    def _start_next(self) -> None:
        assert self.shard is not None
        while self.started < len(self.buckets) and len(self.in_flight) < MAX_IN_FLIGHT:
            piece = self.shard[self.buckets[self.started].shard_range].to(self.weights.dtype)
            self.in_flight.append(self.group.start_all_gather(piece))
            self.started += 1

    def _complete(self, count: int) -> None:
        while self.completed < count:
            bucket = self.buckets[self.completed]
            gathered = wait(self.in_flight.popleft()).view(self.flat.num_shards, -1)
            self.flat.gather_from_shards(bucket, gathered, self.weights)
            self.completed += 1
            self._start_next()


def _aligned(count: int) -> int:
    return -(-count // ALIGN_ELEMENTS) * ALIGN_ELEMENTS

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

from trainyard.parallel.process_group import Group, wait

ALIGN = 64
"""Elements: views start at multiples of 128 bytes or more."""
FLYING = 2
"""Buckets under way at a time: enough to overlap, and it bounds what their copies take."""


@dataclass(frozen=True)
class Span:
    """Where a parameter lies."""

    name: str
    shape: tuple[int, ...]
    start: int
    """First element in the whole row."""
    at: int
    """First element in a shard of it."""
    rows: int
    """Rows of one shard."""

    @property
    def width(self) -> int:
        return prod(self.shape[1:])

    @property
    def chunk(self) -> int:
        return self.rows * self.width


@dataclass(frozen=True)
class Bucket:
    spans: tuple[Span, ...]
    whole: slice
    shard: slice


class Flat:
    """The plan of the memory. Parameters before and after `split` never share a bucket."""

    def __init__(self, shapes: Sequence[tuple[str, tuple[int, ...]]], split: int, shards: int, bucket: int) -> None:
        """`bucket` in elements of the whole row."""
        self.shards = shards
        self.spans: dict[str, Span] = {}
        self.buckets: list[Bucket] = []
        self.size = self.shard_size = self.split = 0
        spans: list[Span] = []

        def close() -> None:
            if spans:
                begin, at = spans[0].start, spans[0].at
                self.buckets.append(Bucket(tuple(spans), slice(begin, self.size), slice(at, self.shard_size)))
                spans.clear()

        for number, (name, shape) in enumerate(shapes):
            if number == split or (spans and self.size + prod(shape) - spans[0].start > bucket):
                close()
            if number == split:
                self.split = self.shard_size
            span = Span(name, shape, self.size, self.shard_size, -(-shape[0] // shards))
            self.spans[name] = span
            spans.append(span)
            self.size += _aligned(prod(shape))
            self.shard_size += _aligned(span.chunk)
        close()
        if split >= len(shapes):
            self.split = self.shard_size

    def view(self, row: Tensor, name: str) -> Tensor:
        """A parameter in the whole row."""
        span = self.spans[name]
        return row[span.start : span.start + prod(span.shape)].view(span.shape)

    def rows(self, name: str, shard: int) -> range:
        """Which of a parameter's rows a shard has (none, for the last shards of a short one)."""
        span = self.spans[name]
        first, end = (min(k * span.rows, span.shape[0]) for k in (shard, shard + 1))
        return range(first, end)

    def shard(self, row: Tensor, name: str, shard: int) -> Tensor:
        """A parameter's rows in a shard's row of memory."""
        span, rows = self.spans[name], len(self.rows(name, shard))
        return row[span.at : span.at + rows * span.width].view(rows, *span.shape[1:])

    def deal(self, bucket: Bucket, row: Tensor, out: Tensor) -> None:
        """From the whole row to shards one after the other: out is [shards, length of the bucket's shard]."""
        for span, mine in self._pieces(bucket, out):
            values = row[span.start : span.start + prod(span.shape)]
            full = len(values) // span.chunk
            mine[:full].copy_(values[: full * span.chunk].view(full, span.chunk))
            if rest := len(values) - full * span.chunk:
                mine[full, :rest].copy_(values[-rest:])

    def collect(self, bucket: Bucket, shards: Tensor, row: Tensor) -> None:
        """The other way."""
        for span, mine in self._pieces(bucket, shards):
            values = row[span.start : span.start + prod(span.shape)]
            full = len(values) // span.chunk
            values[: full * span.chunk].view(full, span.chunk).copy_(mine[:full])
            if rest := len(values) - full * span.chunk:
                values[-rest:].copy_(mine[full, :rest])

    def _pieces(self, bucket: Bucket, shards: Tensor) -> Iterable[tuple[Span, Tensor]]:
        for span in bucket.spans:
            at = span.at - bucket.shard.start
            yield span, shards[:, at : at + span.chunk]


class GradientExchange:
    """Sums gradients over the ranks of `group`: the whole row where every rank updates everything (flat.shards is 1),
    else each rank its shard."""

    def __init__(self, flat: Flat, group: Group, gradients: Tensor, sums: Tensor, dtype: torch.dtype) -> None:
        """`dtype` is what travels. `sums` is where the result goes: `gradients` itself when nothing is sharded."""
        self.flat, self.group = flat, group
        self.gradients, self.sums, self.dtype = gradients, sums, dtype
        self.number = {span.name: number for number, bucket in enumerate(flat.buckets) for span in bucket.spans}
        self.missing: list[int] = []
        self.started: set[int] = set()
        self.flying: deque[tuple[Bucket, Tensor]] = deque()

    def expect(self, times: int) -> None:
        """Before a step: each gradient will arrive so many times (once for each micro batch)."""
        self.missing = [times * len(bucket.spans) for bucket in self.flat.buckets]
        self.started.clear()

    def arrived(self, name: str) -> None:
        number = self.number[name]
        self.missing[number] -= 1
        if self.missing[number] == 0:
            self._start(number)

    def finish(self) -> None:
        """After the last backward pass: whatever has not been sent yet, and wait for all."""
        for number in reversed(range(len(self.flat.buckets))):
            self._start(number)
        while self.flying:
            self._land()

    def _start(self, number: int) -> None:
        if number in self.started or self.group.size == 1:
            return
        self.started.add(number)
        bucket = self.flat.buckets[number]
        if len(self.flying) == FLYING:
            self._land()
        if self.flat.shards == 1:
            mine = self.gradients[bucket.whole]
            self.flying.append((bucket, self.group.start_sum_(mine.to(self.dtype))))
            return
        length = bucket.shard.stop - bucket.shard.start
        dealt = self.gradients.new_zeros(self.flat.shards, length, dtype=self.dtype)
        self.flat.deal(bucket, self.gradients, dealt)
        self.flying.append((bucket, self.group.start_reduce_scatter(dealt.view(-1))))

    def _land(self) -> None:
        bucket, tensor = self.flying.popleft()
        total = wait(tensor)
        if self.flat.shards > 1:
            self.sums[bucket.shard].copy_(total)
        elif self.dtype != self.sums.dtype:  # else it was summed in place
            self.sums[bucket.whole].copy_(total)


class WeightExchange:
    """Brings every rank's shard of new weights to all, in the order in which they are used."""

    def __init__(self, flat: Flat, group: Group, weights: Tensor, used: Callable[[str], Iterable[str]]) -> None:
        """`used` names the moments at which a parameter is needed, such as a layer's number."""
        self.flat, self.group, self.weights = flat, group, weights
        # Norms and biases are few, at the end of memory, and needed from the start.
        small = [bucket for bucket in flat.buckets if bucket.shard.start >= flat.split]
        self.order = small + [bucket for bucket in flat.buckets if bucket.shard.start < flat.split]
        self.needs: dict[str, int] = {}
        for place, bucket in enumerate(self.order):
            for span in bucket.spans:
                for moment in used(span.name):
                    self.needs[moment] = max(self.needs.get(moment, 0), place + 1)
        self.shards: Tensor | None = None
        self.sent = self.landed = len(self.order)
        self.flying: deque[Tensor] = deque()

    def start(self, shards: Tensor) -> None:
        """New weights of this rank's shard are there. They must not change before all have landed."""
        self.shards = shards
        self.sent = self.landed = 0
        self._send()

    def need(self, moment: str) -> None:
        """Wait for what is used at this moment."""
        self._land(self.needs.get(moment, 0))

    def settle(self) -> None:
        """Wait for everything."""
        self._land(len(self.order))

    def _send(self) -> None:
        assert self.shards is not None
        while self.sent < len(self.order) and len(self.flying) < FLYING:
            piece = self.shards[self.order[self.sent].shard].to(self.weights.dtype)
            self.flying.append(self.group.start_gather(piece))
            self.sent += 1

    def _land(self, count: int) -> None:
        while self.landed < count:
            bucket = self.order[self.landed]
            gathered = wait(self.flying.popleft()).view(self.flat.shards, -1)
            self.flat.collect(bucket, gathered, self.weights)
            self.landed += 1
            self._send()


def _aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN

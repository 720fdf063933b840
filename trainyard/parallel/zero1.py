"""ZeRO-1 communication: bucketed gradient reduction and weight gathering that overlap with backward and forward.

- Gradients: a bucket is sent when the last micro batch has filled it, while backward continues with the layers below.
- Weights: buckets are gathered in the order in which the next forward pass uses them, while it runs.
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from trainyard.parallel.flat_buffer import Bucket, FlatBuffer
from trainyard.parallel.process_group import Group, wait

Waiting = Callable[[], AbstractContextManager[object]]
"""Makes the context in which a rank waits for others, so that the caller can measure it."""
DataGroup = Callable[[bool], Group]
"""The ranks that hold the same values of a parameter of experts (True), or of another one."""
MAX_IN_FLIGHT = 2
"""Buckets in flight at a time: enough to overlap, and few enough to bound the memory of their copies."""


class GradientReducer:
    """Sums gradients over data-parallel ranks: by all-reduce without ZeRO, else by reduce-scatter."""

    def __init__(
        self,
        flat: FlatBuffer,
        data_group: DataGroup,
        gradients: Tensor,
        reduced_grads: Tensor,
        dtype: torch.dtype,
        waiting: Waiting = nullcontext,
    ) -> None:
        """`dtype` is the dtype of communication. `reduced_grads` is `gradients` itself if nothing is sharded.
        `waiting` is entered while this rank waits for others."""
        self.flat, self.data_group, self.waiting = flat, data_group, waiting
        self.gradients, self.reduced_grads, self.dtype = gradients, reduced_grads, dtype
        self.sharded = reduced_grads is not gradients
        self.bucket_index = {span.name: index for index, bucket in enumerate(flat.buckets) for span in bucket.spans}
        self.pending_grads: list[int] = []
        self.started: set[int] = set()
        self.in_flight: deque[tuple[Bucket, Tensor]] = deque()

    def begin_step(self, micro_batches: int) -> None:
        """Expect every gradient once per micro batch."""
        self.pending_grads = [micro_batches * len(bucket.spans) for bucket in self.flat.buckets]
        self.started.clear()

    def on_grad_ready(self, name: str) -> None:
        """Count a gradient that backward has accumulated, and send its bucket when it is complete."""
        index = self.bucket_index[name]
        self.pending_grads[index] -= 1
        if self.pending_grads[index] == 0:
            self._start_bucket(index)

    def finish(self) -> None:
        """Send the buckets that are not sent yet, and wait for all. Call it after the last backward pass."""
        # As backward completes them, from the last layers on: ranks must start collectives in the same order.
        for index in reversed(range(len(self.flat.buckets))):
            self._start_bucket(index)
        while self.in_flight:
            self._complete()

    def _start_bucket(self, index: int) -> None:
        if index in self.started:
            return
        self.started.add(index)
        bucket = self.flat.buckets[index]
        group = self.data_group(bucket.of_experts)
        if group.size == 1:
            if self.sharded:  # the experts of no other rank, among parameters that are sharded
                self.reduced_grads[bucket.shard_range].copy_(self.gradients[bucket.full_range])
            return
        if len(self.in_flight) == MAX_IN_FLIGHT:  # limits the memory of buffers, which a fast backward would fill
            self._complete()
        if not self.sharded:
            gradients = self.gradients[bucket.full_range]
            self.in_flight.append((bucket, group.start_all_reduce_(gradients.to(self.dtype))))
            return
        shards = self.gradients.new_zeros(bucket.num_shards, bucket.shard_elements, dtype=self.dtype)
        self.flat.scatter_to_shards(bucket, self.gradients, shards)
        with self.waiting():  # waits for the other ranks where compat emulates it
            self.in_flight.append((bucket, group.start_reduce_scatter(shards.view(-1))))

    def _complete(self) -> None:
        bucket, pending = self.in_flight.popleft()
        with self.waiting():
            total = wait(pending)
        if self.sharded:
            self.reduced_grads[bucket.shard_range].copy_(total)
        elif self.dtype != self.reduced_grads.dtype:  # otherwise the all-reduce was in place
            self.reduced_grads[bucket.full_range].copy_(total)


class WeightGatherer:
    """All-gathers the updated weights of every rank's shard, in the order of use."""

    def __init__(
        self,
        flat: FlatBuffer,
        data_group: DataGroup,
        weights: Tensor,
        needed_at: Callable[[str], Iterable[str]],
        waiting: Waiting = nullcontext,
    ) -> None:
        """`needed_at` returns the moments at which a parameter is used, such as a layer index. `waiting` is
        entered while this rank waits for others."""
        self.flat, self.data_group, self.weights, self.waiting = flat, data_group, weights, waiting
        # Norms and biases are few, lie at the end of the buffer, and are needed from the start.
        undecayed = range(flat.shard_decay_end, flat.shard_undecayed_end)
        self.buckets = sorted(flat.buckets, key=lambda bucket: bucket.shard_range.start not in undecayed)
        self.buckets_needed: dict[str, int] = {}
        """Number of buckets that must be complete at each moment."""
        for index, bucket in enumerate(self.buckets):
            for span in bucket.spans:
                for moment in needed_at(span.name):
                    self.buckets_needed[moment] = max(self.buckets_needed.get(moment, 0), index + 1)
        self.shard: Tensor | None = None
        self.started = self.completed = len(self.buckets)
        self.in_flight: deque[Tensor] = deque()

    def start(self, shard: Tensor) -> None:
        """Begin to gather the updated weights. `shard` must not change before all buckets are complete."""
        self.shard = shard
        self.started = self.completed = 0
        self._start_next()

    def wait_for(self, moment: str) -> None:
        """Wait for the weights used at this moment."""
        self._complete(self.buckets_needed.get(moment, 0))

    def wait_all(self) -> None:
        """Wait for all weights."""
        self._complete(len(self.buckets))

    def _start_next(self) -> None:
        assert self.shard is not None
        while self.started < len(self.buckets) and len(self.in_flight) < MAX_IN_FLIGHT:
            bucket = self.buckets[self.started]
            group, piece = self.data_group(bucket.of_experts), self.shard[bucket.shard_range].to(self.weights.dtype)
            with self.waiting():  # waits for the other ranks where compat emulates it
                self.in_flight.append(piece if group.size == 1 else group.start_all_gather(piece))
            self.started += 1

    def _complete(self, count: int) -> None:
        while self.completed < count:
            bucket = self.buckets[self.completed]
            with self.waiting():
                gathered = self.in_flight.popleft()
                gathered = gathered if bucket.num_shards == 1 else wait(gathered)
            shards = gathered.view(bucket.num_shards, -1)
            self.flat.gather_from_shards(bucket, shards, self.weights)
            self.completed += 1
            self._start_next()

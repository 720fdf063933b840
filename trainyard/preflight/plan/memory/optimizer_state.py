"""Memory of weights, gradients and optimizer state, and what their initialization, exchange and update take besides.

It follows `train/optim/` and `parallel/zero1.py`, and uses the same `FlatBuffer` layout.
"""

from collections import Counter
from collections.abc import Iterator
from math import prod

from trainyard.core.constants import DTYPE_BYTES
from trainyard.core.counter_rng import CHUNK_ELEMENTS
from trainyard.families.blueprint import layer_index
from trainyard.parallel.flat_buffer import Bucket
from trainyard.parallel.layout import StageSpec
from trainyard.parallel.zero1 import MAX_IN_FLIGHT
from trainyard.preflight.plan.memory.pass_memory import RankMemory
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.rank_parameters import local_params
from trainyard.train.optim.flat_state import missing_state

INIT_BYTES_PER_ELEMENT, PREVIOUS_CHUNK_BYTES_PER_ELEMENT = 32, 20
"""Bytes per element of the chunk of initial weights that core/counter_rng.py draws, and of the chunk before it."""


class OptimizerMemory:
    """Weights, gradients and optimizer state of a rank."""

    def __init__(self, run: PlannedRun, stages: list[StageSpec]) -> None:
        self.run = run
        params = local_params(run.model, run.layout.model_shard(0), stages)
        self.flat, self.frozen_flat = run.flat_buffer(params), run.frozen_buffer(params)
        self.trained_bytes = self.flat.size * DTYPE_BYTES[run.precision.compute_dtype]
        """Of all trained weights, in the compute dtype."""
        trained = (param.spec for param in params.values() if param.spec.trained)
        self.stored_bytes = run.stored_bytes(params)
        self.largest = max(prod(param.shape) for param in params.values())
        """Elements of a rank's largest parameter."""
        missing = set[str]().union(*(missing_state(run.rule, spec) for spec in trained))
        self.resident = self._resident(missing)
        """Bytes from the first step to the last."""

    def _resident(self, missing: set[str]) -> RankMemory:
        """`missing` are the state buffers that the last parameters lack."""
        precision, zero, size, shard = self.run.precision, self.run.zero, self.flat.size, self.flat.shard_size
        compute, gradient = DTYPE_BYTES[precision.compute_dtype], DTYPE_BYTES[precision.grad_accum_dtype]
        master = 2 if precision.kind == "bf16_sr" else 4
        states = self.run.rule.state_names
        moments = 4 * sum(self.flat.shard_undecayed_end if name in missing else shard for name in states)
        if zero >= 2:
            frozen = self.frozen_flat.shard_size * compute + self.stored_bytes
            return RankMemory(frozen, shard * master, shard * master + moments)
        gradients = size * gradient + (shard * gradient if zero else 0)
        master_is_weights = not zero and master == compute
        copies = 1 + self.run.preparation.keeps_weights
        weights = copies * self.trained_bytes + self.frozen_flat.size * compute + self.stored_bytes
        return RankMemory(weights, gradients, moments + (0 if master_is_weights else shard * master))

    def gathered_weights(self) -> tuple[int, int, int]:
        """Full weights under ZeRO-2 and 3, as torch's fully_shard gathers them: at the loss, in the forward pass and in
        the backward pass. Those outside the blocks, and with ZeRO-2 all, stay from forward to backward; ZeRO-3 also has
        those of a block and of the next one. The backward pass adds a block's full gradients, once in the compute dtype
        and once in the reduce dtype, as far as the block is trained."""
        zero, precision = self.run.zero, self.run.precision
        if zero < 2:
            return 0, 0, 0
        compute, reduce = DTYPE_BYTES[precision.compute_dtype], DTYPE_BYTES[precision.grad_reduce_dtype]
        sizes, trained = Counter[int | None](), Counter[int | None]()
        for flat in (self.flat, self.frozen_flat):
            for name, span in flat.spans.items():
                sizes[layer_index(name)] += prod(span.shape)
                trained[layer_index(name)] += prod(span.shape) * (flat is self.flat)
        block, trained_block = (
            max(size for layer, size in counter.items() if layer is not None) for counter in (sizes, trained)
        )
        at_loss = compute * (sizes.total() if zero == 2 else sizes[None])
        forward = at_loss + compute * (0 if zero == 2 else 2 * block)
        return at_loss, forward, forward + trained_block * (compute + reduce)

    def initialization(self, unallocated: int) -> RankMemory:
        """Initial weights are drawn in fp32, one parameter at a time, before `unallocated` bytes of the run exist."""
        size = self.largest
        drawn = 4 * size + INIT_BYTES_PER_ELEMENT * min(size, CHUNK_ELEMENTS)
        drawn += PREVIOUS_CHUNK_BYTES_PER_ELEMENT * CHUNK_ELEMENTS * (size >= 2 * CHUNK_ELEMENTS)
        return RankMemory(buffers=drawn - unallocated)

    def gradient_exchange(self, live_after_layer: list[dict[int, int]]) -> Iterator[RankMemory]:
        """Gradient buckets in flight during the last backward pass, and weight buckets after the update.
        `live_after_layer` has, for each stage, the bytes that are live after a layer's backward pass."""
        zero, precision = self.run.zero, self.run.precision
        reduce, gradient = DTYPE_BYTES[precision.grad_reduce_dtype], DTYPE_BYTES[precision.grad_accum_dtype]
        if zero >= 2 or (not zero and reduce == gradient):
            return
        by_all_reduce = self.run.device.gathers_by_all_reduce
        sizes = [bucket.padded_elements * reduce for bucket in self.flat.buckets]
        for index, bucket in enumerate(self.flat.buckets):
            ahead = 0 if by_all_reduce else sum(sizes[index + 1 : index + MAX_IN_FLIGHT + 1])
            live = max(stage.get(_completing_layer(bucket), 0) for stage in live_after_layer)
            current = sizes[index] * (2 if by_all_reduce else 1)
            current += sizes[index] // bucket.num_shards
            yield RankMemory(activations=live, buffers=ahead + current)
        if zero:
            gathered = [bucket.padded_elements + bucket.shard_elements for bucket in self.flat.buckets]
            compute = DTYPE_BYTES[precision.compute_dtype]
            yield RankMemory(buffers=sum(sorted(gathered, reverse=True)[:MAX_IN_FLIGHT]) * compute)

    def update_workspace(self) -> RankMemory:
        """Temporary memory of the optimizer's update."""
        return RankMemory(optimizer=self.run.rule.workspace_bytes(self.run.update_shape(self.flat)))


def _completing_layer(bucket: Bucket) -> int:
    """The layer whose backward pass completes a bucket; -1 for the embedding."""
    layers = [layer_index(span.name) for span in bucket.spans]
    return min(-1 if layer is None else layer for layer in layers)

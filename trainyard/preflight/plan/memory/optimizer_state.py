"""Memory of weights, gradients and optimizer state, and what their initialization, exchange and update take besides.

It follows `train/optim/` and `parallel/zero1.py`, and uses the same `FlatBuffer` layout.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from trainyard.config.schema import Config
from trainyard.core.constants import DTYPE_BYTES
from trainyard.core.counter_rng import CHUNK_ELEMENTS
from trainyard.devices.kind import DeviceKind
from trainyard.families.blueprint import layer_index
from trainyard.parallel.flat_buffer import Bucket, FlatBuffer
from trainyard.parallel.layout import Layout, StageSpec
from trainyard.parallel.zero1 import MAX_IN_FLIGHT
from trainyard.preflight.plan.memory.pass_memory import RankMemory
from trainyard.preflight.plan.rank_parameters import local_params, planned_rule, rank_flat_buffer
from trainyard.train.optim.flat_state import missing_state
from trainyard.train.optim.update_rule import UpdateShape

INIT_BYTES_PER_ELEMENT, PREVIOUS_CHUNK_BYTES_PER_ELEMENT = 32, 20
"""Bytes per element of the chunk of initial weights that core/counter_rng.py draws, and of the chunk before it."""


@dataclass(frozen=True)
class OptimizerMemory:
    """Weights, gradients and optimizer state of a rank."""

    resident: RankMemory
    """Bytes from the first step to the last."""
    flat: FlatBuffer
    zero: int

    @classmethod
    def from_config(cls, config: Config, layout: Layout, stages: list[StageSpec]) -> "OptimizerMemory":
        precision = config.precision
        zero = layout.zero
        compute, gradient = DTYPE_BYTES[precision.compute_dtype], DTYPE_BYTES[precision.grad_accum_dtype]
        master = 2 if precision.kind == "bf16_sr" else 4
        params = local_params(config.model, layout.model_shard(0), stages)
        flat = rank_flat_buffer(config, params, layout)
        size, shard = flat.size, flat.shard_size
        rule = planned_rule(config)
        partial = set[str]().union(*(missing_state(rule, param.spec) for param in params.values()))
        moments = 4 * sum(flat.shard_undecayed_end if name in partial else shard for name in rule.state_names)
        if zero >= 2:
            resident = RankMemory(gradients=shard * master, optimizer=shard * master + moments)
            return cls(resident, flat, zero)
        gradients = size * gradient + (shard * gradient if zero else 0)
        master_is_weights = not zero and master == compute
        optimizer = moments + (0 if master_is_weights else shard * master)
        return cls(RankMemory(size * compute, gradients, optimizer), flat, zero)

    def gathered_weights(self, config: Config) -> tuple[int, int, int]:
        """Full weights under ZeRO-2 and 3, as torch's fully_shard gathers them: at the loss, in the forward pass and in
        the backward pass. Those outside the blocks, and with ZeRO-2 all, stay from forward to backward; ZeRO-3 also has
        those of a block and of the next one. The backward pass adds a block's full gradients, once in the compute dtype
        and once in the reduce dtype."""
        if self.zero < 2:
            return 0, 0, 0
        compute, reduce = DTYPE_BYTES[config.precision.compute_dtype], DTYPE_BYTES[config.precision.grad_reduce_dtype]
        sizes = Counter[int | None]()
        for name, span in self.flat.spans.items():
            sizes[layer_index(name)] += prod(span.shape)
        block = max(size for layer, size in sizes.items() if layer is not None)
        at_loss = compute * (sizes.total() if self.zero == 2 else sizes[None])
        forward = at_loss + compute * (0 if self.zero == 2 else 2 * block)
        return at_loss, forward, forward + block * (compute + reduce)

    def initialization(self, unallocated: int) -> RankMemory:
        """Initial weights are drawn in fp32, one parameter at a time, before `unallocated` bytes of the run exist."""
        size = max(prod(span.shape) for span in self.flat.spans.values())
        drawn = 4 * size + INIT_BYTES_PER_ELEMENT * min(size, CHUNK_ELEMENTS)
        drawn += PREVIOUS_CHUNK_BYTES_PER_ELEMENT * CHUNK_ELEMENTS * (size >= 2 * CHUNK_ELEMENTS)
        return RankMemory(buffers=drawn - unallocated)

    def gradient_exchange(
        self, config: Config, live_after_layer: list[dict[int, int]], device: DeviceKind
    ) -> Iterator[RankMemory]:
        """Gradient buckets in flight during the last backward pass, and weight buckets after the update.
        `live_after_layer` has, for each stage, the bytes that are live after a layer's backward pass."""
        precision = config.precision
        reduce, gradient = DTYPE_BYTES[precision.grad_reduce_dtype], DTYPE_BYTES[precision.grad_accum_dtype]
        if self.zero >= 2 or (not self.zero and reduce == gradient):
            return
        sizes = [bucket.padded_elements * reduce for bucket in self.flat.buckets]
        for index, bucket in enumerate(self.flat.buckets):
            ahead = 0 if device.gathers_by_all_reduce else sum(sizes[index + 1 : index + MAX_IN_FLIGHT + 1])
            live = max(stage.get(_completing_layer(bucket), 0) for stage in live_after_layer)
            current = sizes[index] * (2 if device.gathers_by_all_reduce else 1)
            current += sizes[index] // bucket.num_shards
            yield RankMemory(activations=live, buffers=ahead + current)
        if self.zero:
            gathered = [bucket.padded_elements + bucket.shard_elements for bucket in self.flat.buckets]
            compute = DTYPE_BYTES[precision.compute_dtype]
            yield RankMemory(buffers=sum(sorted(gathered, reverse=True)[:MAX_IN_FLIGHT]) * compute)

    def update_workspace(self, config: Config, layout: Layout, device: DeviceKind) -> RankMemory:
        """Temporary memory of the optimizer's update."""
        has_fused_kernels = device.fused_kernels and config.device.kernels == "fused"
        shape = UpdateShape(layout, config.precision, self.flat, self.zero >= 2, has_fused_kernels)
        return RankMemory(optimizer=planned_rule(config).workspace_bytes(shape))


def _completing_layer(bucket: Bucket) -> int:
    """The layer whose backward pass completes a bucket; -1 for the embedding."""
    layers = [layer_index(span.name) for span in bucket.spans]
    return min(-1 if layer is None else layer for layer in layers)

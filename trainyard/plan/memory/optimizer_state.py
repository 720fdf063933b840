"""What lies in memory from the first step to the last, and what passes through it besides activations: gradients and
weights on their way between ranks, the update, the drawing of initial weights.

As `train/optim/optimizer.py`, `parallel/flat_buffer.py` and `parallel/fsdp.py` do it; the plan of the rows is
`Flat` itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from trainyard.config.schema import Config
from trainyard.core.counter_rng import CHUNK_ELEMENTS
from trainyard.models.blueprint import Blueprint, layer_index
from trainyard.parallel.flat_buffer import MAX_IN_FLIGHT, Bucket, FlatBuffer
from trainyard.parallel.layout import Layout, StageSpec
from trainyard.plan.memory.device_kinds import DTYPE_BYTES, MIB, DeviceKind

INIT_BYTES_PER_ELEMENT, PREVIOUS_CHUNK_BYTES_PER_ELEMENT = 32, 20
"""Bytes for each number of a chunk of initial weights that is drawn (random.py), and what is left of the one before."""
UPDATE_BYTES_PER_WEIGHT, ROUNDED_UPDATE_BYTES_PER_WEIGHT = 24, 36
"""Bytes that an update of plain operations takes for each weight it updates at a time (train/optim/update_rules.py)."""


@dataclass(frozen=True)
class ExtraMemory:
    """What a moment takes besides state and batches."""

    activations: int = 0
    logits: int = 0
    buffers: int = 0
    optimizer: int = 0
    weights: int = 0

    def plus(self, activations: int, weights: int) -> "ExtraMemory":
        return replace(self, activations=self.activations + activations, weights=self.weights + weights)

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.buffers + self.optimizer + self.weights


@dataclass(frozen=True)
class OptimizerMemory:
    """What lies in memory from the first step to the last."""

    weights: int
    gradients: int
    optimizer: int
    flat: FlatBuffer
    zero: int

    @classmethod
    def from_config(
        cls, config: Config, layout: Layout, blueprint: Blueprint, stages: list[StageSpec]
    ) -> "OptimizerMemory":
        precision = config.precision
        ranks = layout.dp * layout.cp
        zero = config.layout.zero if ranks > 1 else 0
        compute, gradient = DTYPE_BYTES[precision.compute_dtype], DTYPE_BYTES[precision.grad_accum_dtype]
        kept = 2 if precision.kind == "bf16_sr" else 4
        bucket = config.layout.bucket_mib * MIB // DTYPE_BYTES[precision.grad_reduce_dtype]
        shapes = list(_param_shapes(blueprint, stages, layout.tp))
        shapes.sort(key=lambda pair: not blueprint.spec(pair[0]).weight_decay)
        decayed = sum(blueprint.spec(name).weight_decay for name, _ in shapes)
        flat = FlatBuffer(shapes, decayed, ranks if zero else 1, bucket)
        size, shard = flat.size, flat.shard_size
        if zero >= 2:
            return cls(0, shard * kept, shard * (kept + 8), flat, zero)
        alone = flat.num_shards == 1 and kept == compute
        return cls(
            size * compute,
            size * gradient + (shard * gradient if flat.num_shards > 1 else 0),
            shard * 8 + (0 if alone else shard * kept),
            flat,
            zero,
        )

    def gathered_weights(self, config: Config, at_loss: bool, backward: bool) -> int:
        """Weights in whole under ZeRO-2 and 3, as torch's fully_shard gathers them: those outside the blocks stay from
        forward to backward, with stage 2 all do; else those of a block and of the next. In backward a block's gradients
        in whole too, and once more as they travel."""
        if self.zero < 2:
            return 0
        compute, travel = DTYPE_BYTES[config.precision.compute_dtype], DTYPE_BYTES[config.precision.grad_reduce_dtype]
        sizes: dict[int | None, int] = {}
        for name, span in self.flat.spans.items():
            sizes[layer_index(name)] = sizes.get(layer_index(name), 0) + prod(span.shape)
        block = max(size for number, size in sizes.items() if number is not None)
        stay = sum(sizes.values()) if self.zero == 2 else sizes.get(None, 0)
        passing = 0 if at_loss or self.zero == 2 else 2 * block
        return (stay + passing) * compute + (block * (compute + travel) if backward else 0)

    def initialization(self, unallocated: int) -> ExtraMemory:
        """Initial weights are drawn, a matrix at a time in fp32, when what is held `later` is not there yet."""
        sizes = [prod(span.shape) for span in self.flat.spans.values()]
        drawn = max(
            4 * size
            + INIT_BYTES_PER_ELEMENT * min(size, CHUNK_ELEMENTS)
            + (PREVIOUS_CHUNK_BYTES_PER_ELEMENT * CHUNK_ELEMENTS if size >= 2 * CHUNK_ELEMENTS else 0)
            for size in sizes
        )
        return ExtraMemory(buffers=drawn - unallocated)

    def gradient_exchange(
        self, config: Config, live_after_layer: list[dict[int, int]], device: DeviceKind
    ) -> Iterator[ExtraMemory]:
        """Buckets of gradients on their way, in the last backward pass; and of weights, after the update. `left` says
        for each stage what is live when the backward pass of a block is over."""
        travel, gradient = (
            DTYPE_BYTES[config.precision.grad_reduce_dtype],
            DTYPE_BYTES[config.precision.grad_accum_dtype],
        )
        if self.flat.num_shards == 1 and travel == gradient:
            return
        if self.zero >= 2:
            return
        sizes = [self._padded_elements(bucket) * travel for bucket in self.flat.buckets]
        for number, bucket in enumerate(self.flat.buckets):
            ahead = sum(sizes[number + 1 : number + MAX_IN_FLIGHT + 1]) if not device.gathers_by_all_reduce else 0
            live = max(each.get(_completing_layer(bucket), 0) for each in live_after_layer)
            own = sizes[number] * (2 if device.gathers_by_all_reduce else 1) + sizes[number] // self.flat.num_shards
            yield ExtraMemory(live, buffers=ahead + own)
        if self.zero:
            compute = DTYPE_BYTES[config.precision.compute_dtype]
            gathered = sorted((self._padded_elements(bucket) for bucket in self.flat.buckets), reverse=True)[
                :MAX_IN_FLIGHT
            ]
            yield ExtraMemory(buffers=sum(gathered) * compute * (self.flat.num_shards + 1) // self.flat.num_shards)

    def _padded_elements(self, bucket: Bucket) -> int:
        """Numbers of a bucket, its shards padded to one size."""
        return (bucket.shard_range.stop - bucket.shard_range.start) * self.flat.num_shards

    def update_workspace(self, config: Config, device: DeviceKind) -> ExtraMemory:
        """What the optimizer takes while it updates: nothing where one kernel does all."""
        fused = device.fused_kernels and config.device.kernels == "fused"
        spans = self.flat.spans.values()
        largest = max((span.shard_numel for span in spans), default=0)
        if config.optimizer.kind == "lamb":
            copies = self.flat.shard_size * (4 if config.precision.kind == "bf16_sr" else 0)
            return ExtraMemory(optimizer=self.flat.shard_size * 4 + copies + UPDATE_BYTES_PER_WEIGHT * largest)
        if fused:
            return ExtraMemory()
        if config.precision.kind == "bf16_sr":
            return ExtraMemory(optimizer=ROUNDED_UPDATE_BYTES_PER_WEIGHT * largest)
        if config.precision.grad_accum_dtype == "bf16" and self.zero < 2:
            return ExtraMemory(
                optimizer=UPDATE_BYTES_PER_WEIGHT
                * max(self.flat.shard_decay_end, self.flat.shard_size - self.flat.shard_decay_end)
            )
        return ExtraMemory()


def _completing_layer(bucket: Bucket) -> int:
    """The block whose backward pass completes a bucket."""
    numbers = [layer_index(span.name) for span in bucket.spans]
    return min(-1 if number is None else number for number in numbers)


def _param_shapes(blueprint: Blueprint, stages: list[StageSpec], tp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters of a rank in the order of the model's modules, a tied one once."""
    ends = {"first": any(stage.is_first for stage in stages), "last": any(stage.is_last for stage in stages)}
    ends["both"] = ends["first"] or ends["last"]
    blocks = [row.name for row in blueprint.specs if row.pipeline_stage == "block"]
    before = True
    for row in blueprint.specs:
        if row.pipeline_stage != "block":
            if ends[row.pipeline_stage]:
                yield row.name, blueprint.local_shape(row.name, tp)
        elif before:
            before = False
            for number in sorted(number for stage in stages for number in stage.layers):
                for pattern in blocks:
                    name = pattern.replace("*", str(number))
                    yield name, blueprint.local_shape(name, tp)

"""What lies in memory from the first step to the last, and what passes through it besides activations: gradients and
weights on their way between ranks, the update, the drawing of initial weights.

As `train/optim/optimizer.py`, `parallel/flat_buffer.py` and `parallel/fsdp.py` do it; the plan of the rows is
`Flat` itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from trainyard.config.schema import Config
from trainyard.core.counter_rng import CHUNK
from trainyard.models.blueprint import Blueprint, layer
from trainyard.parallel.flat_buffer import FLYING, Bucket, Flat
from trainyard.parallel.layout import Layout, Stage
from trainyard.plan.memory.device_kinds import BYTES, MIB, Kind

DRAWN, LEFT = 32, 20
"""Bytes for each number of a chunk of initial weights that is drawn (random.py), and what is left of the one before."""
PLAIN, ROUNDED = 24, 36
"""Bytes that an update of plain operations takes for each weight it updates at a time (train/optim/update_rules.py)."""


@dataclass(frozen=True)
class Extra:
    """What a moment takes besides state and batches."""

    activations: int = 0
    logits: int = 0
    buffers: int = 0
    optimizer: int = 0
    weights: int = 0

    def plus(self, activations: int, weights: int) -> "Extra":
        return replace(self, activations=self.activations + activations, weights=self.weights + weights)

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.buffers + self.optimizer + self.weights


@dataclass(frozen=True)
class State:
    """What lies in memory from the first step to the last."""

    weights: int
    gradients: int
    optimizer: int
    flat: Flat
    zero: int

    @classmethod
    def of(cls, config: Config, layout: Layout, blueprint: Blueprint, stages: list[Stage]) -> "State":
        precision = config.precision
        ranks = layout.dp * layout.cp
        zero = config.layout.zero if ranks > 1 else 0
        compute, gradient = BYTES[precision.compute], BYTES[precision.accumulate]
        kept = 2 if precision.kind == "bf16_sr" else 4
        bucket = config.layout.bucket * MIB // BYTES[precision.travel]
        shapes = list(_shapes(blueprint, stages, layout.tp))
        shapes.sort(key=lambda pair: not blueprint.row(pair[0]).decay)
        decayed = sum(blueprint.row(name).decay for name, _ in shapes)
        flat = Flat(shapes, decayed, ranks if zero else 1, bucket)
        size, shard = flat.size, flat.shard_size
        if zero >= 2:
            return cls(0, shard * kept, shard * (kept + 8), flat, zero)
        alone = flat.shards == 1 and kept == compute
        return cls(
            size * compute,
            size * gradient + (shard * gradient if flat.shards > 1 else 0),
            shard * 8 + (0 if alone else shard * kept),
            flat,
            zero,
        )

    def gathered(self, config: Config, at_loss: bool, backward: bool) -> int:
        """Weights in whole under ZeRO-2 and 3, as torch's fully_shard gathers them: those outside the blocks stay from
        forward to backward, with stage 2 all do; else those of a block and of the next. In backward a block's gradients
        in whole too, and once more as they travel."""
        if self.zero < 2:
            return 0
        compute, travel = BYTES[config.precision.compute], BYTES[config.precision.travel]
        sizes: dict[int | None, int] = {}
        for name, span in self.flat.spans.items():
            sizes[layer(name)] = sizes.get(layer(name), 0) + prod(span.shape)
        block = max(size for number, size in sizes.items() if number is not None)
        stay = sum(sizes.values()) if self.zero == 2 else sizes.get(None, 0)
        passing = 0 if at_loss or self.zero == 2 else 2 * block
        return (stay + passing) * compute + (block * (compute + travel) if backward else 0)

    def building(self, later: int) -> Extra:
        """Initial weights are drawn, a matrix at a time in fp32, when what is held `later` is not there yet."""
        sizes = [prod(span.shape) for span in self.flat.spans.values()]
        drawn = max(4 * size + DRAWN * min(size, CHUNK) + (LEFT * CHUNK if size >= 2 * CHUNK else 0) for size in sizes)
        return Extra(buffers=drawn - later)

    def exchange(self, config: Config, left: list[dict[int, int]], device: Kind) -> Iterator[Extra]:
        """Buckets of gradients on their way, in the last backward pass; and of weights, after the update. `left` says
        for each stage what is live when the backward pass of a block is over."""
        travel, gradient = BYTES[config.precision.travel], BYTES[config.precision.accumulate]
        if self.flat.shards == 1 and travel == gradient:
            return
        if self.zero >= 2:
            return
        sizes = [self._dealt(bucket) * travel for bucket in self.flat.buckets]
        for number, bucket in enumerate(self.flat.buckets):
            ahead = sum(sizes[number + 1 : number + FLYING + 1]) if not device.sums else 0
            live = max(each.get(_lowest(bucket), 0) for each in left)
            own = sizes[number] * (2 if device.sums else 1) + sizes[number] // self.flat.shards
            yield Extra(live, buffers=ahead + own)
        if self.zero:
            compute = BYTES[config.precision.compute]
            gathered = sorted((self._dealt(bucket) for bucket in self.flat.buckets), reverse=True)[:FLYING]
            yield Extra(buffers=sum(gathered) * compute * (self.flat.shards + 1) // self.flat.shards)

    def _dealt(self, bucket: Bucket) -> int:
        """Numbers of a bucket, its shards padded to one size."""
        return (bucket.shard.stop - bucket.shard.start) * self.flat.shards

    def update(self, config: Config, device: Kind) -> Extra:
        """What the optimizer takes while it updates: nothing where one kernel does all."""
        fused = device.fused and config.device.kernels == "fused"
        spans = self.flat.spans.values()
        largest = max((span.chunk for span in spans), default=0)
        if config.optimizer.kind == "lamb":
            copies = self.flat.shard_size * (4 if config.precision.kind == "bf16_sr" else 0)
            return Extra(optimizer=self.flat.shard_size * 4 + copies + PLAIN * largest)
        if fused:
            return Extra()
        if config.precision.kind == "bf16_sr":
            return Extra(optimizer=ROUNDED * largest)
        if config.precision.accumulate == "bf16" and self.zero < 2:
            return Extra(optimizer=PLAIN * max(self.flat.split, self.flat.shard_size - self.flat.split))
        return Extra()


def _lowest(bucket: Bucket) -> int:
    """The block whose backward pass completes a bucket."""
    numbers = [layer(span.name) for span in bucket.spans]
    return min(-1 if number is None else number for number in numbers)


def _shapes(blueprint: Blueprint, stages: list[Stage], tp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters of a rank in the order of the model's modules, a tied one once."""
    ends = {"first": any(stage.first for stage in stages), "last": any(stage.last for stage in stages)}
    ends["both"] = ends["first"] or ends["last"]
    blocks = [row.name for row in blueprint.rows if row.place == "block"]
    before = True
    for row in blueprint.rows:
        if row.place != "block":
            if ends[row.place]:
                yield row.name, blueprint.local_shape(row.name, tp)
        elif before:
            before = False
            for number in sorted(number for stage in stages for number in stage.layers):
                for pattern in blocks:
                    name = pattern.replace("*", str(number))
                    yield name, blueprint.local_shape(name, tp)

"""Memory of one rank by what it is for, and what one micro batch needs in the forward and backward pass of a stage,
from a trace of a few of its layers.

Layers of one kind add the same, so that only the first ones of each kind are traced.
"""

from dataclasses import dataclass
from itertools import groupby
from math import ceil

from trainyard.config.schema import Config
from trainyard.core.constants import DTYPE_BYTES
from trainyard.parallel.layout import Layout, StageSpec
from trainyard.preflight.plan.memory.device_kinds import DeviceKind
from trainyard.preflight.plan.trace.memory_trace import MemoryTrace, trace_memory
from trainyard.preflight.plan.trace.part_recorder import EMBEDDING, LOSS
from trainyard.preflight.plan.trace.stage_run import MicroBatchShape, TracedStage
from trainyard.train.decisions import fp8_layer_range, fuses_wgrad, packs_batches
from trainyard.train.micro_batches.split import PACKED_LENGTH_MULTIPLE

TRACED_LAYERS = 2
"""Layers of each kind that are traced. The second one has what any further one has."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank at some point of a step; sums of them are added field by field."""

    weights: int = 0
    """Weights in the compute dtype; under ZeRO-2 and 3 the gathered ones."""
    gradients: int = 0
    optimizer: int = 0
    """Master weights, moments, and temporary memory of the update."""
    activations: int = 0
    logits: int = 0
    """Memory of the loss, if the peak is there."""
    buffers: int = 0
    """Batches, receive buffers, buckets in flight, workspaces of libraries."""
    fragmentation: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def __add__(self, other: "RankMemory") -> "RankMemory":
        return RankMemory(**{name: size + getattr(other, name) for name, size in vars(self).items()})


class RankSizes:
    """Sizes and options of one rank and one micro batch that decide how much memory activations need."""

    def __init__(self, config: Config, layout: Layout, device: DeviceKind) -> None:
        self.config, self.layout, self.device = config, layout, device
        self.sequence_parallel = config.layout.sequence_parallel and layout.tp > 1
        self.fused_kernels = device.fused_kernels and config.device.kernels == "fused"
        """Triton kernels are used."""
        self.packed_batch = packs_batches(config, layout, self.fused_kernels)
        """Padding is removed from samples."""
        samples, seq_len = config.train.micro_batch, config.data.seq_len // layout.cp
        self.tokens = samples * seq_len
        if self.packed_batch and config.data.source == "synthetic":
            # The data decide how much padding there is: synthetic samples are half to all full, less 3 special tokens.
            room = seq_len - 3
            mean = 3 + (room // 2 + room) / 2
            self.tokens = ceil(samples * mean / PACKED_LENGTH_MULTIPLE) * PACKED_LENGTH_MULTIPLE
        self.micro_batch = MicroBatchShape.from_config(config, layout, self.tokens if self.packed_batch else None)
        tokens = self.tokens // (layout.tp if self.sequence_parallel else 1)
        self.local_hidden_bytes = tokens * config.model.hidden * DTYPE_BYTES[config.precision.compute_dtype]
        """Bytes of the activations between attention and MLP."""

    def traced_stage(self, layers: int, fp8_layers: range, is_first: bool, is_last: bool) -> TracedStage:
        """The stage with this number of layers."""
        config, layout = self.config, self.layout
        fused = self.fused_kernels, fuses_wgrad(config, layout, self.fused_kernels, config.compile.enabled)
        ends = is_first, is_last
        return TracedStage.from_config(config, layout, self.micro_batch, self.device, layers, fp8_layers, fused, ends)


@dataclass(frozen=True)
class PassMemory:
    """Memory of one micro batch in the forward and backward pass of a stage."""

    saved: int
    """Bytes saved from forward to backward."""
    forward: RankMemory
    """Peak of the forward pass."""
    backward: RankMemory
    """Peak of the backward pass."""
    deferred_grads: int
    """Gradients that wait for the weight half of a split backward pass."""
    live_after_layer: dict[int, int]
    """Live bytes after each layer's backward pass; -1 stands for the embedding."""


def pass_memory(config: Config, sizes: RankSizes, stage: StageSpec) -> PassMemory:
    fp8_layers = fp8_layer_range(config)
    runs = [(fp8, list(layers)) for fp8, layers in groupby(stage.layers, lambda layer: layer in fp8_layers)]
    counts = [min(len(layers), TRACED_LAYERS) for _, layers in runs]
    kinds = [fp8 for (fp8, _), count in zip(runs, counts, strict=True) for _ in range(count)]
    fp8_traced = range(kinds.index(True), kinds.index(True) + kinds.count(True)) if True in kinds else range(0)
    traced = sizes.traced_stage(sum(counts), fp8_traced, stage.is_first, stage.is_last)
    return _extrapolate(trace_memory(traced), [layers for _, layers in runs], counts, stage)


def _extrapolate(trace: MemoryTrace, runs: list[list[int]], counts: list[int], stage: StageSpec) -> PassMemory:
    """Each run of equal layers was traced with its first `count` layers."""
    added: dict[int, int] = {EMBEDDING: 0}
    """Bytes that untraced layers up to a part's own run save, by part."""
    entries = list(trace.entry_bytes.values())  # the embedding's, then those of layers and of the head, in order
    live_after, deferred = {}, dict(trace.deferred_grads)
    total, first = 0, 0
    for layers, count in zip(runs, counts, strict=True):
        last = first + count - 1
        per_layer = entries[last + 2] - entries[last + 1]
        for index, layer in enumerate(layers):
            part = first + min(index, count - 1)
            live_after[layer] = trace.end_bytes.get(part, 0) + total + (index - part + first) * per_layer
        missing = len(layers) - count
        total += missing * per_layer
        added |= dict.fromkeys(range(first, first + count), total)
        deferred[last] = deferred.get(last, 0) * (1 + missing)
        first += count
    forward, backward = (
        {part: peak + added.get(part, total) for part, peak in peaks.items()}
        for peaks in (trace.forward_peaks, trace.backward_peaks)
    )
    peak_part = max(forward, key=lambda part: forward[part])
    logits = forward[LOSS] - trace.entry_bytes[LOSS] - total if peak_part == LOSS else 0
    return PassMemory(
        saved=trace.saved + total,
        forward=RankMemory(activations=forward[peak_part] - logits, logits=logits),
        backward=RankMemory(activations=max(backward.values())),
        deferred_grads=sum(deferred.values()),
        live_after_layer=live_after | {-1: trace.end_bytes.get(EMBEDDING, 0)},
    )

"""Memory of one rank by what it is for, and what one micro batch needs in the forward and backward pass of a stage,
from a trace of a few of its layers.

Layers of one kind add the same, and so do repetitions of a pattern of kinds (layers with and without a window, in
turn): only the first ones are traced.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from trainyard.config.schema import Config
from trainyard.core.constants import DTYPE_BYTES
from trainyard.devices.kind import DeviceKind
from trainyard.parallel.layout import Layout, StageSpec
from trainyard.preflight.plan.layer_kinds import traced_alike
from trainyard.preflight.plan.trace.memory_trace import MemoryTrace, trace_memory
from trainyard.preflight.plan.trace.part_recorder import EMBEDDING, LOSS
from trainyard.preflight.plan.trace.stage_run import MicroBatchShape, TracedStage
from trainyard.train.decisions import fuses_wgrad, packs_batches
from trainyard.train.micro_batches.split import PACKED_LENGTH_MULTIPLE

TRACED_REPEATS = 2
"""Repetitions of a pattern of layers that are traced. The second one has what any further one has."""


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
        self.packed_batch = packs_batches(config.model, layout, self.fused_kernels)
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

    def traced_stage(self, layers: Sequence[int], is_first: bool, is_last: bool) -> TracedStage:
        """A stage with these layers."""
        config, layout = self.config, self.layout
        fused = self.fused_kernels, fuses_wgrad(layout, config.precision, self.fused_kernels, config.compile.enabled)
        ends = is_first, is_last
        return TracedStage.from_config(config, layout, self.micro_batch, self.device, layers, fused, ends)


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


@dataclass(frozen=True)
class _Run:
    """Layers of a stage whose kinds repeat a pattern; for layers of one kind its length is 1."""

    start: int
    """Place of the first layer in the stage."""
    length: int
    """Layers of the pattern."""
    repeats: int

    @property
    def traced_repeats(self) -> int:
        return min(self.repeats, TRACED_REPEATS)


def pass_memory(config: Config, sizes: RankSizes, stage: StageSpec) -> PassMemory:
    alike = traced_alike(config)
    kinds = [alike[layer] for layer in stage.layers]
    runs = _split_into_runs(kinds)
    # Equal stages of a pipeline share a trace: each traces the model's first layers of the kinds that it has.
    unused = {kind: iter([layer for layer, other in enumerate(alike) if other == kind]) for kind in set(kinds)}
    ranges = (range(run.start, run.start + run.length * run.traced_repeats) for run in runs)
    traced = [next(unused[kinds[place]]) for places in ranges for place in places]
    trace = trace_memory(sizes.traced_stage(traced, stage.is_first, stage.is_last))
    return _extrapolate(trace, traced, runs, stage)


def _split_into_runs(kinds: Sequence[int]) -> list[_Run]:
    """Runs that cover all layers, each the longest possible from where the one before ends."""
    runs: list[_Run] = []
    start = 0
    while start < len(kinds):
        candidates = [_Run(start, 1, 1)]
        for length in range(1, (len(kinds) - start) // 2 + 1):
            end, pattern = start + length, kinds[start : start + length]
            while kinds[end : end + length] == pattern:
                end += length
            candidates.append(_Run(start, length, (end - start) // length))
        repeated = [run for run in candidates if run.repeats > 1] or candidates[:1]
        runs.append(max(repeated, key=lambda run: run.length * run.repeats))  # the shortest pattern of the longest
        start += runs[-1].length * runs[-1].repeats
    return runs


def _extrapolate(trace: MemoryTrace, traced: list[int], runs: list[_Run], stage: StageSpec) -> PassMemory:
    """The memory of all layers, from the traced ones."""
    added: dict[int, int] = {EMBEDDING: 0}
    """Bytes that untraced layers up to a part's own run save, by part."""
    entries = list(trace.entry_bytes.values())  # the embedding's, then those of layers and of the head, in order
    live_after, deferred = {}, dict(trace.deferred_grads)
    total, first = 0, 0  # bytes of untraced layers so far; place of the run's first layer among traced ones
    for run in runs:
        last = first + run.length * (run.traced_repeats - 1)
        end, missing = last + run.length, run.repeats - run.traced_repeats
        per_repeat = entries[end + 1] - entries[last + 1]
        for index in range(run.length * run.repeats):
            repeat, place = divmod(index, run.length)
            skipped = max(repeat - run.traced_repeats + 1, 0)
            part = traced[first + (repeat - skipped) * run.length + place]
            live_after[stage.layers[run.start + index]] = trace.end_bytes.get(part, 0) + total + skipped * per_repeat
        total += missing * per_repeat
        added |= dict.fromkeys(traced[first:end], total)
        deferred |= {part: deferred.get(part, 0) * (1 + missing) for part in traced[last:end]}
        first = end
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

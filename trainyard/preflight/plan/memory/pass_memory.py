"""Memory of one rank by what it is for, and what one micro batch needs in the forward and backward pass of a stage,
from a trace of a few of its layers.

Layers of one kind add the same, and so do repetitions of a pattern of kinds (layers with and without a window, in
turn): only the first ones are traced.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainyard.parallel.layout import StageSpec
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.trace.memory_trace import MemoryTrace, trace_memory
from trainyard.preflight.plan.trace.part_recorder import EMBEDDING, LOSS

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
class _LayerPattern:
    """Layers of a stage whose kinds repeat a pattern; for layers of one kind its length is 1."""

    start: int
    """Place of the first layer in the stage."""
    length: int
    """Layers of the pattern."""
    repeats: int

    @property
    def traced_repeats(self) -> int:
        return min(self.repeats, TRACED_REPEATS)


def pass_memory(run: PlannedRun, stage: StageSpec) -> PassMemory:
    kinds = [run.alike[layer] for layer in stage.layers]
    patterns = _split_into_patterns(kinds)
    # Equal stages of a pipeline share a trace: each traces the model's first layers of the kinds that it has.
    unused = {kind: iter([layer for layer, other in enumerate(run.alike) if other == kind]) for kind in set(kinds)}
    ranges = (range(pattern.start, pattern.start + pattern.length * pattern.traced_repeats) for pattern in patterns)
    traced = [next(unused[kinds[place]]) for places in ranges for place in places]
    trace = trace_memory(run.traced_stage(traced, stage.is_first, stage.is_last))
    return _extrapolate(trace, traced, patterns, stage)


def _split_into_patterns(kinds: Sequence[int]) -> list[_LayerPattern]:
    """Patterns that cover all layers, each the longest possible from where the one before ends."""
    patterns: list[_LayerPattern] = []
    start = 0
    while start < len(kinds):
        candidates = [_LayerPattern(start, 1, 1)]
        for length in range(1, (len(kinds) - start) // 2 + 1):
            end, period = start + length, kinds[start : start + length]
            while kinds[end : end + length] == period:
                end += length
            candidates.append(_LayerPattern(start, length, (end - start) // length))
        repeated = [pattern for pattern in candidates if pattern.repeats > 1] or candidates[:1]
        longest = max(repeated, key=lambda pattern: pattern.length * pattern.repeats)  # the shortest pattern of them
        patterns.append(longest)
        start += longest.length * longest.repeats
    return patterns


def _extrapolate(trace: MemoryTrace, traced: list[int], patterns: list[_LayerPattern], stage: StageSpec) -> PassMemory:
    """The memory of all layers, from the traced ones."""
    added: dict[int, int] = {EMBEDDING: 0}
    """Bytes that untraced layers up to a part's own pattern save, by part."""
    entries = list(trace.entry_bytes.values())  # the embedding's, then those of layers and of the head, in order
    live_after, deferred = {}, dict(trace.deferred_grads)
    total, first = 0, 0  # bytes of untraced layers so far; place of the pattern's first layer among traced ones
    for pattern in patterns:
        last = first + pattern.length * (pattern.traced_repeats - 1)
        end, missing = last + pattern.length, pattern.repeats - pattern.traced_repeats
        per_repeat = entries[end + 1] - entries[last + 1]
        for index in range(pattern.length * pattern.repeats):
            repeat, place = divmod(index, pattern.length)
            skipped = max(repeat - pattern.traced_repeats + 1, 0)
            part = traced[first + (repeat - skipped) * pattern.length + place]
            layer = stage.layers[pattern.start + index]
            live_after[layer] = trace.end_bytes.get(part, 0) + total + skipped * per_repeat
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
        backward=RankMemory(activations=max(backward.values(), default=0)),
        deferred_grads=sum(deferred.values()),
        live_after_layer=live_after | {-1: trace.end_bytes.get(EMBEDDING, 0)},
    )

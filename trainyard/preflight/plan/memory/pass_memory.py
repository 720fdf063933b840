"""Memory of one micro batch in the forward and backward pass of a stage, from a trace of a few of its layers.

Layers of one kind add the same, so that only the first ones of each kind are traced.
"""

from dataclasses import dataclass
from itertools import groupby

from trainyard.config.schema import Config
from trainyard.parallel.layout import StageSpec
from trainyard.preflight.plan.memory.local_sizes import RankSizes
from trainyard.preflight.plan.memory.rank_memory import RankMemory
from trainyard.preflight.plan.trace.memory_trace import MemoryTrace, trace_memory
from trainyard.preflight.plan.trace.part_recorder import EMBEDDING, LOSS
from trainyard.train.decisions import fp8_layer_range

TRACED_LAYERS = 2
"""Layers of each kind that are traced. The second one has what any further one has."""


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

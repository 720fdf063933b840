"""Training FLOP of one sample, counted from the blueprint.

Backward counts as twice the forward, and for a matrix that is not trained as once; recompute is not counted. Attention
FLOP come in both conventions: `full` counts every query-key pair, `causal` only the pairs that the mask keeps. Compare
MFU between systems only within one convention.
"""

from collections import Counter
from dataclasses import dataclass
from math import prod

from trainyard.families.blueprint import Blueprint, ParamSpec
from trainyard.families.model_config import ModelConfig
from trainyard.families.registry import family_of


@dataclass(frozen=True)
class SampleFlops:
    """Training FLOP of one sample in the two conventions for attention."""

    full_attention: float
    causal_attention: float


def flops_per_sample(c: ModelConfig, blueprint: Blueprint, seq_len: int, max_predictions: int) -> SampleFlops:
    tokens = {"tokens": seq_len, "masked": max_predictions, "first": 1, "nothing": 0}
    matmuls = 0.0
    for spec in blueprint.specs:
        multiplied = prod(spec.shape) * spec.flops_share * tokens[spec.flops_tokens]
        matmuls += 2 * multiplied * blueprint.copies(spec) * spec.matmul_passes
    if blueprint.tied_head:
        vocab, hidden, head_tokens = blueprint.tied_head
        matmuls += 2 * vocab * hidden * tokens[head_tokens] * blueprint.tied_head_passes
    last = [c.layers - 1] * len(c.mtp_blocks)  # which are like the last layer
    layers = Counter(mixing_flops(c, layer, seq_len) for layer in (*range(c.layers), *last))
    full, causal = (sum(count * flops[kind] for flops, count in layers.items()) for kind in range(2))
    return SampleFlops(matmuls + 3.0 * full, matmuls + 3.0 * causal)


def layer_flops(c: ModelConfig, blueprint: Blueprint, seq_len: int) -> list[float]:
    """Forward FLOP of one sample in each layer, without masked pairs."""
    return [
        sum(2 * prod(spec.shape) * spec.flops_share * seq_len for spec in _matrices(blueprint, layer))
        + mixing_flops(c, layer, seq_len)[1]
        for layer in range(c.layers)
    ]


def mixing_flops(c: ModelConfig, layer: int, seq_len: int) -> tuple[float, float]:
    """Forward FLOP of one sample in this layer besides matrices: with all pairs of tokens, and with those that its mask
    keeps."""
    recurrence, keys = c.recurrence(layer), pair_flops(c, layer) * seq_len
    of_state = recurrence.flops * seq_len if recurrence else 0
    return of_state + keys * seq_len, of_state + keys * family_of(c).visible_keys(c, layer, seq_len)


def pair_flops(c: ModelConfig, layer: int) -> int:
    """Forward FLOP of a query and a key in all heads of a layer: a score, and a value times its weight."""
    return 2 * c.heads * sum(c.attention_widths(layer))


def _matrices(blueprint: Blueprint, layer: int) -> list[ParamSpec]:
    return [spec for spec in blueprint.block_specs(layer) if spec.flops_tokens == "tokens"]

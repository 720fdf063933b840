"""Training FLOP of one sample, counted from the blueprint.

Backward counts as twice the forward; recompute is not counted. Attention FLOP come in both conventions: `full` counts
every query-key pair, `causal` only the pairs that the mask keeps. Compare MFU between systems only within one
convention.
"""

from dataclasses import dataclass
from math import prod

from trainyard.families.blueprint import Blueprint
from trainyard.families.model_config import ModelConfig
from trainyard.families.registry import family_of


@dataclass(frozen=True)
class SampleFlops:
    """Training FLOP of one sample in the two conventions for attention."""

    full_attention: float
    causal_attention: float


def flops_per_sample(c: ModelConfig, blueprint: Blueprint, seq_len: int, max_predictions: int) -> SampleFlops:
    tokens = {"tokens": seq_len, "masked": max_predictions, "first": 1, "nothing": 0}
    matmuls = sum(
        2 * prod(spec.shape) * spec.flops_share * tokens[spec.flops_tokens] * (c.layers if "*" in spec.name else 1)
        for spec in blueprint.specs
    )
    if blueprint.tied_head:
        vocab, hidden, head_tokens = blueprint.tied_head
        matmuls += 2 * vocab * hidden * tokens[head_tokens]
    attention = 4 * c.layers * c.heads * c.head_size * seq_len**2
    visible = family_of(c).visible_keys(c, seq_len) / seq_len
    return SampleFlops(3.0 * (matmuls + attention), 3.0 * (matmuls + attention * visible))

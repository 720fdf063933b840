"""FLOP of training one sample, counted from the blueprint.

Backward counts twice the forward; recompute is not counted. Attention is given in both conventions: full counts every
query-key pair, causal only those that a causal mask keeps. Compare MFU between systems only in the same one.
"""

from dataclasses import dataclass
from math import prod

from trainyard.config.model_schema import BertConfig, GptConfig, LlamaConfig
from trainyard.models.blueprint import Blueprint


@dataclass(frozen=True)
class SampleFlops:
    full_attention: float
    causal_attention: float


def flops_per_sample(
    c: LlamaConfig | GptConfig | BertConfig, blueprint: Blueprint, seq_len: int, max_predictions: int
) -> SampleFlops:
    tokens = {"tokens": seq_len, "masked": max_predictions, "first": 1, "nothing": 0}
    products = sum(
        2 * prod(row.shape) * tokens[row.flops_tokens] * (c.layers if "*" in row.name else 1) for row in blueprint.specs
    )
    if blueprint.tied_head:
        vocab, hidden, sees = blueprint.tied_head
        products += 2 * vocab * hidden * tokens[sees]
    attention = 4 * c.layers * c.heads * c.head_size * seq_len**2
    half = 1.0 if isinstance(c, BertConfig) else (seq_len + 1) / (2 * seq_len)
    return SampleFlops(3.0 * (products + attention), 3.0 * (products + attention * half))

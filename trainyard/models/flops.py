"""FLOP of training one sample, counted from the blueprint.

Backward counts twice the forward; recompute is not counted. Attention is given in both conventions: full counts every
query-key pair, causal only those that a causal mask keeps. Compare MFU between systems only in the same one.
"""

from dataclasses import dataclass
from math import prod

from trainyard.config.model_schema import BertModel, GptModel, LlamaModel
from trainyard.models.blueprint import Blueprint


@dataclass(frozen=True)
class Flops:
    full: float
    causal: float


def per_sample(c: LlamaModel | GptModel | BertModel, blueprint: Blueprint, sequence: int, predictions: int) -> Flops:
    tokens = {"tokens": sequence, "masked": predictions, "first": 1, "nothing": 0}
    products = sum(
        2 * prod(row.shape) * tokens[row.sees] * (c.layers if "*" in row.name else 1) for row in blueprint.rows
    )
    if blueprint.tied_head:
        vocab, hidden, sees = blueprint.tied_head
        products += 2 * vocab * hidden * tokens[sees]
    attention = 4 * c.layers * c.heads * c.head_size * sequence**2
    half = 1.0 if isinstance(c, BertModel) else (sequence + 1) / (2 * sequence)
    return Flops(3.0 * (products + attention), 3.0 * (products + attention * half))

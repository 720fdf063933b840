"""Embeddings, the output projection, and rotary position frequencies."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.families.decoder import DecoderConfig, LinearRopeScaling, Llama3RopeScaling
from trainyard.kernels.reference import Kernels
from trainyard.parallel.tensor_parallel import TensorAxis


class Embedding(nn.Module):
    """A lookup table that every tensor-parallel rank holds in full."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class OutputProjection(nn.Module):
    """The output matrix [V, D]. Tensor-parallel ranks split its rows (the vocabulary); the loss multiplies by it."""

    vocab_start: Tensor
    """Vocabulary index of this rank's first row."""

    def __init__(self, weight: nn.Parameter, tp: TensorAxis) -> None:
        super().__init__()
        self.weight = weight
        start = torch.tensor(tp.rank * weight.shape[0], dtype=torch.int32)
        self.register_buffer("vocab_start", start, persistent=False)


class VocabEmbedding(OutputProjection):
    """A lookup in a vocabulary-parallel matrix: ranks sum what they find. Tied, it is the output projection too."""

    def __init__(self, weight: nn.Parameter, tp: TensorAxis, kernels: Kernels) -> None:
        super().__init__(weight, tp)
        self.tp, self.kernels = tp, kernels

    def forward(self, tokens: Tensor) -> Tensor:
        if self.tp.size == 1:
            return self.kernels.embedding(tokens, self.weight)
        index = tokens - self.vocab_start
        is_local = (index >= 0) & (index < self.weight.shape[0])
        rows = F.embedding(torch.where(is_local, index, 0), self.weight)
        return self.tp.reduce_output(torch.where(is_local[..., None], rows, 0.0))


def rope_frequencies(c: DecoderConfig) -> Tensor:
    """Radians per position of each pair of dims, [K / 2], with the configured context extension."""
    frequency = 1.0 / c.rope_theta ** (torch.arange(0, c.rotary_size, 2, dtype=torch.float32) / c.rotary_size)
    scaling = c.rope_scaling
    if isinstance(scaling, LinearRopeScaling):
        return frequency / scaling.factor
    if isinstance(scaling, Llama3RopeScaling):
        turns = scaling.original_max_positions * frequency / (2 * torch.pi)
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        return frequency * ((1 - smooth) / scaling.factor + smooth)
    return frequency

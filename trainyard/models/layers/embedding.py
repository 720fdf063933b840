"""Embeddings and the output projection."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

    def __init__(self, weight: nn.Parameter, tp: TensorAxis, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
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

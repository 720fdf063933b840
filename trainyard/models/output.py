"""What a forward pass gives: hidden states and the output matrix, from which a loss takes logits piece by piece."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass
class Output:
    hidden: Tensor
    """[..., D]: every token of a causal model, the masked places of BERT."""
    weight: Tensor
    """[V, D] of the output head."""
    bias: Tensor | None = None
    next_sentence: Tensor | None = None
    """[B, 2] logits of BERT's next-sentence head."""

    def logits(self) -> Tensor:
        """All logits at once, [..., V]: convenient for a loss of your own, large for a big vocabulary."""
        return F.linear(self.hidden, self.weight, self.bias)

"""What a forward pass gives: hidden states and the output matrix, from which a loss takes logits piece by piece."""

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from trainyard.parallel.tensor_parallel import TensorAxis


@dataclass
class ModelOutput:
    local_hidden: Tensor
    """[..., D] as this rank holds them; under sequence parallelism (`split`) just its tokens."""
    weight: Tensor
    """[V, D] of the output head; under tensor parallelism this rank's rows of it, from row `first` on."""
    bias: Tensor | None = None
    next_sentence: Tensor | None = None
    """[B, 2] logits of BERT's next-sentence head."""
    tp: TensorAxis = field(default_factory=TensorAxis)
    vocab_start: Tensor | None = None
    vocab_size: int | None = None
    """Rows of the whole head that are words; those beyond are padding."""
    tokens_sharded: bool = False

    @property
    def hidden(self) -> Tensor:
        """[..., D]: every token of a causal model, the masked places of BERT. For work that all ranks repeat."""
        return self.tp.gather_tokens(self.local_hidden) if self.tokens_sharded else self.local_hidden

    def hidden_for_head(self) -> Tensor:
        """The same for work that ranks share, such as a product with their own rows of the head."""
        return (
            self.tp.gather_sum_grads(self.local_hidden)
            if self.tokens_sharded
            else self.tp.copy_sum_grads(self.local_hidden)
        )

    def logits(self) -> Tensor:
        """All logits at once, [..., V]: convenient for a loss of your own, large for a big vocabulary."""
        return self.tp.gather_last_dim(F.linear(self.hidden_for_head(), self.weight, self.bias))[..., : self.vocab_size]

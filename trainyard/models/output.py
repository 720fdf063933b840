"""ModelOutput: hidden states and the output matrix, from which a loss computes logits chunk by chunk."""

from dataclasses import dataclass, field, replace

import torch.nn.functional as F
from torch import Tensor

from trainyard.parallel.context_parallel import ContextAxis
from trainyard.parallel.tensor_parallel import TensorAxis


@dataclass
class ModelOutput:
    """The result of a forward pass. A custom loss can use `hidden` or `logits()`."""

    local_hidden: Tensor
    """[..., D] hidden states of this rank; only its own tokens if `tokens_sharded` (sequence parallelism)."""
    weight: Tensor
    """[V, D] of the output projection; under tensor parallelism this rank's rows, from row `vocab_start` on."""
    bias: Tensor | None = None
    next_sentence: Tensor | None = None
    """[B, 2] logits of BERT's next-sentence head."""
    tp: TensorAxis = field(default_factory=TensorAxis)
    tp_rank: Tensor | None = None
    """Rank on that axis. A tensor, so that all ranks share one graph."""
    vocab_start: Tensor | None = None
    vocab_size: int | None = None
    """Rows of the full output projection that are vocabulary entries; the rows after them are padding."""
    tokens_sharded: bool = False
    cp: ContextAxis = field(default_factory=ContextAxis)
    """Ranks that hold other tokens of the same samples."""

    @property
    def hidden(self) -> Tensor:
        """[..., D]: every token of a causal model, the masked positions of BERT. For work that all ranks repeat."""
        return self.tp.gather_tokens(self.local_hidden, self.tp_rank) if self.tokens_sharded else self.local_hidden

    def hidden_for_head(self) -> Tensor:
        """`hidden` for work that ranks split, such as the matmul with their rows of the output projection. Backward
        sums the gradients of all ranks."""
        if self.tokens_sharded:
            return self.tp.gather_sum_grads(self.local_hidden)
        return self.tp.copy_sum_grads(self.local_hidden)

    def logits(self) -> Tensor:
        """All logits at once, [..., V]: convenient for a custom loss, large for a big vocabulary."""
        return self.gather_vocab(F.linear(self.hidden_for_head(), self.weight, self.bias))

    def at_temperature(self, temperature: float) -> "ModelOutput":
        """The output whose logits are divided by `temperature`."""
        if temperature == 1:
            return self
        bias = None if self.bias is None else self.bias / temperature
        return replace(self, local_hidden=self.local_hidden / temperature, bias=bias)

    def gather_vocab(self, logits: Tensor) -> Tensor:
        """[..., V] logits of all ranks, without padding, from those of this rank's rows of the output projection."""
        return self.tp.gather_last_dim(logits, self.tp_rank)[..., : self.vocab_size]

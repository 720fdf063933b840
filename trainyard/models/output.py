"""ModelOutput: hidden states and the output matrix, from which a loss computes logits chunk by chunk."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
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
    soft_cap: float | None = None
    """Bound c of the logits x, which are c tanh(x / c)."""

    further: "tuple[tuple[ModelOutput, Tensor], ...]" = ()
    """Predictions of tokens further ahead, each with its labels (multi-token prediction)."""
    further_weight: float = 0.0
    """Weight of their mean loss."""

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
        return self.logits_of(self.hidden_for_head())

    def logits_of(self, hidden: Tensor, linear: Callable[..., Tensor] = F.linear) -> Tensor:
        """The logits [..., V] of hidden states that `hidden_for_head` returned."""
        logits = linear(hidden, self.weight, self.bias)
        if self.soft_cap is not None:
            logits = (self.soft_cap * torch.tanh(logits.float() / self.soft_cap)).to(logits.dtype)
        return self._gather_vocab(logits)

    def at_temperature(self, temperature: float) -> "ModelOutput":
        """The output whose logits are divided by `temperature`."""
        if temperature == 1:
            return self
        bias = None if self.bias is None else self.bias / temperature
        cap = None if self.soft_cap is None else self.soft_cap / temperature
        return replace(self, local_hidden=self.local_hidden / temperature, bias=bias, soft_cap=cap)

    def _gather_vocab(self, logits: Tensor) -> Tensor:
        """[..., V] logits of all ranks, without padding, from those of this rank's rows of the output projection."""
        return self.tp.gather_last_dim(logits, self.tp_rank)[..., : self.vocab_size]

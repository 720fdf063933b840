"""The loss by the position of a token in its window, which shows how far a model's context reaches."""

from typing import Any

import torch

from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.models import Batch, ModelOutput
from trainyard.train.evaluate import EvaluationTotals, perplexity_of
from trainyard.train.loss import Loss, LossTerms, UserLoss


class LossByPosition(Loss):
    """Another loss, and the cross entropy of the tokens in each of `parts` equal parts of a window."""

    def __init__(self, loss: Loss, parts: int) -> None:
        if isinstance(loss, UserLoss) or not loss.is_causal:
            raise UserError(f"--by-position {parts}: needs a loss of next tokens; nearest: train.loss=null")
        super().__init__(loss.head_loss)
        self.loss, self.parts, self.is_causal = loss, parts, loss.is_causal
        self.term_names = loss.term_names
        self.part_names = tuple(f"position {part}" for part in range(parts))
        self.metric_names = (*loss.metric_names, *self.part_names)

    def terms(self, output: ModelOutput, batch: Batch) -> LossTerms:
        labels, cp = batch["labels"], output.cp
        losses = self.head_loss(output, labels, per_token=True).float().flatten()
        tokens = labels.shape[1]
        position = cp.token_positions(tokens, torch.tensor(cp.rank, dtype=torch.int32, device=labels.device))
        part = (position.long() * self.parts // (tokens * cp.size)).expand_as(labels).flatten()
        sums, counts = (
            torch.zeros(self.parts, device=labels.device).index_add_(0, part, values)
            for values in (losses, (labels.flatten() != IGNORE_INDEX).float())
        )
        pairs = zip(sums.unbind(), counts.unbind(), strict=True)
        return self.loss.terms(output, batch) | dict(zip(self.part_names, pairs, strict=True))


def position_rows(loss: LossByPosition, totals: EvaluationTotals, seq_len: int) -> list[dict[str, Any]]:
    """For each part of a window with tokens: its first and last position, mean loss, perplexity and tokens."""
    means, rows = totals.means(), []
    for part, name in enumerate(loss.part_names):
        first, end = (-(-seq_len * bound // loss.parts) for bound in (part, part + 1))
        if count := round(totals.counts[name]):
            mean = means[name]
            row = {"first": first, "last": end - 1, "loss": mean, "perplexity": perplexity_of(mean), "tokens": count}
            rows.append(row)
    return rows

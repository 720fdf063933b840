"""Losses as (sum, count) pairs: the loss of a step is each term's sum over its count in the global batch, in fp32.

Means of micro batches are never averaged, so neither the micro batch size nor the number of ranks changes the loss.
Labels of IGNORE_INDEX do not count.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.core.constants import IGNORE_INDEX
from trainyard.models import Batch, Family, ModelOutput
from trainyard.train.cross_entropy import chunked_cross_entropy
from trainyard.train.user_functions import check_sum_and_count

LossTerms = dict[str, tuple[Tensor, Tensor]]
"""(sum, count) of each term."""
LossFunction = Callable[[ModelOutput, Batch], tuple[Tensor, Tensor]]
"""A user's loss: (output, batch) to (sum, count)."""
HeadLoss = Callable[[ModelOutput, Tensor], Tensor]
"""(output, labels) to the cross entropy summed over all labels except IGNORE_INDEX."""


class Loss(Protocol):
    """The loss of a model family, or a user's."""

    term_names: tuple[str, ...]
    """Names of the terms; the loss is their sum."""

    def label_counts(self, batch: Batch) -> list[Tensor]:
        """Counted labels of each term; empty if they are known only after the forward pass."""

    def terms(self, output: ModelOutput, batch: Batch) -> LossTerms:
        """Sum and count of each term over this batch."""


class CausalLoss:
    """Next-token cross entropy."""

    term_names: tuple[str, ...] = ("lm",)

    def __init__(self, head_loss: HeadLoss = chunked_cross_entropy) -> None:
        self.head_loss = head_loss

    def label_counts(self, batch: Batch) -> list[Tensor]:
        return [count_labels(batch["labels"])]

    def terms(self, output: ModelOutput, batch: Batch) -> LossTerms:
        return {"lm": (self.head_loss(output, batch["labels"]), count_labels(batch["labels"]))}


class BertLoss(CausalLoss):
    """Masked-token cross entropy plus next-sentence cross entropy, each divided by its own count."""

    term_names = ("mlm", "nsp")

    def label_counts(self, batch: Batch) -> list[Tensor]:
        return [count_labels(batch["labels"]), count_labels(batch["next_sentence_labels"])]

    def terms(self, output: ModelOutput, batch: Batch) -> LossTerms:
        assert output.next_sentence is not None
        # Compares indices instead of gathering: torch's gather-based loss takes 64-bit indices only.
        scores = F.log_softmax(output.next_sentence.float(), -1)
        answer = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
        nsp = -torch.where(answer == batch["next_sentence_labels"][:, None], scores, 0.0).sum()
        sums = (self.head_loss(output, batch["labels"]), nsp)
        return dict(zip(self.term_names, zip(sums, self.label_counts(batch), strict=True), strict=True))


class UserLoss:
    """A user's function (output, batch) -> (sum, count). Its count is known after the forward pass and divides the
    gradients."""

    term_names: tuple[str, ...] = ("loss",)

    def __init__(self, function: LossFunction) -> None:
        self.function = function

    def label_counts(self, batch: Batch) -> list[Tensor]:
        return []

    def terms(self, output: ModelOutput, batch: Batch) -> LossTerms:
        return {"loss": check_sum_and_count(self.function(output, batch), self.function)}


def make_loss(family: Family, head_loss: HeadLoss) -> Loss:
    """The loss that a model family is trained with."""
    return BertLoss(head_loss) if family.loss == "bert_pretraining" else CausalLoss(head_loss)


def count_labels(labels: Tensor) -> Tensor:
    """Number of labels other than IGNORE_INDEX, in fp32."""
    return (labels != IGNORE_INDEX).sum().float()

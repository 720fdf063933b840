"""Losses as (sum, count) pairs: a step's loss is each term's sum over its count in the whole global batch, in fp32.

Means of micro batches are never averaged, so neither micro batch size nor rank count changes the number. Labels of -100
count nowhere.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.core.constants import IGNORE_INDEX
from trainyard.models import Batch, ModelOutput
from trainyard.train.cross_entropy import chunked_cross_entropy
from trainyard.train.user_functions import check_sum_and_count

LossTerms = dict[str, tuple[Tensor, Tensor]]
LossFunction = Callable[[ModelOutput, Batch], tuple[Tensor, Tensor]]
HeadLoss = Callable[[ModelOutput, Tensor], Tensor]
"""(output, labels): cross entropy summed over labels that count."""


class Loss(Protocol):
    @property
    def term_names(self) -> tuple[str, ...]:
        """Of the terms."""

    def label_counts(self, batch: Batch) -> dict[str, Tensor] | None:
        """How many labels each term counts, known from the labels alone; None where only the forward pass tells."""

    def terms(self, output: ModelOutput, batch: Batch) -> LossTerms:
        """Each term's sum and count over this batch."""


class CausalLoss:
    """Next-token cross entropy."""

    term_names = ("lm",)

    def __init__(self, head: HeadLoss = chunked_cross_entropy) -> None:
        self.head_loss = head

    def label_counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"lm": count_labels(batch["labels"])}

    def terms(self, output: ModelOutput, batch: Batch) -> LossTerms:
        return {"lm": (self.head_loss(output, batch["labels"]), count_labels(batch["labels"]))}


class BertLoss:
    """Masked-token cross entropy plus next-sentence cross entropy, each divided by its own count."""

    term_names = ("mlm", "nsp")

    def __init__(self, head: HeadLoss = chunked_cross_entropy) -> None:
        self.head_loss = head

    def label_counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"mlm": count_labels(batch["labels"]), "nsp": count_labels(batch["next_sentence_labels"])}

    def terms(self, output: ModelOutput, batch: Batch) -> LossTerms:
        counts = self.label_counts(batch)
        assert output.next_sentence is not None
        # Compared with each answer's number, not looked up: torch's own looks up by 64-bit integers only.
        scores = F.log_softmax(output.next_sentence.float(), -1)
        answer = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
        nsp = -torch.where(answer == batch["next_sentence_labels"][:, None], scores, 0.0).sum()
        return {"mlm": (self.head_loss(output, batch["labels"]), counts["mlm"]), "nsp": (nsp, counts["nsp"])}


class UserLoss:
    """A user's function (output, batch) -> (sum, count). Its count is known only afterwards and divides last."""

    term_names = ("loss",)

    def __init__(self, function: LossFunction) -> None:
        self.function = function

    def label_counts(self, batch: Batch) -> None:
        return None

    def terms(self, output: ModelOutput, batch: Batch) -> LossTerms:
        total, count = check_sum_and_count(self.function(output, batch), self.function)
        return {"loss": (total, count)}


def make_loss(family: str, head: HeadLoss) -> Loss:
    """What a family is trained by, unless a user's own function is."""
    return BertLoss(head) if family == "bert" else CausalLoss(head)


def count_labels(labels: Tensor) -> Tensor:
    return (labels != IGNORE_INDEX).sum().float()

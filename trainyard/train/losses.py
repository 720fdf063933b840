"""Losses as (sum, count) pairs: a step's loss is each term's sum over its count in the whole global batch, in fp32.

Means of micro batches are never averaged, so neither micro batch size nor rank count changes the number. Labels of -100
count nowhere.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.models import Batch, Output
from trainyard.train.cross_entropy import IGNORED, cross_entropy
from trainyard.train.user_functions import pair

Terms = dict[str, tuple[Tensor, Tensor]]
LossFunction = Callable[[Output, Batch], tuple[Tensor, Tensor]]
Head = Callable[[Output, Tensor], Tensor]
"""(output, labels): cross entropy summed over labels that count."""


class Loss(Protocol):
    @property
    def names(self) -> tuple[str, ...]:
        """Of the terms."""

    def counts(self, batch: Batch) -> dict[str, Tensor] | None:
        """How many labels each term counts, known from the labels alone; None where only the forward pass tells."""

    def terms(self, output: Output, batch: Batch) -> Terms:
        """Each term's sum and count over this batch."""


class CausalLoss:
    """Next-token cross entropy."""

    names = ("lm",)

    def __init__(self, head: Head = cross_entropy) -> None:
        self.head = head

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"lm": counted(batch["labels"])}

    def terms(self, output: Output, batch: Batch) -> Terms:
        return {"lm": (self.head(output, batch["labels"]), counted(batch["labels"]))}


class BertLoss:
    """Masked-token cross entropy plus next-sentence cross entropy, each divided by its own count."""

    names = ("mlm", "nsp")

    def __init__(self, head: Head = cross_entropy) -> None:
        self.head = head

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"mlm": counted(batch["labels"]), "nsp": counted(batch["next_sentence"])}

    def terms(self, output: Output, batch: Batch) -> Terms:
        counts = self.counts(batch)
        assert output.next_sentence is not None
        # Compared with each answer's number, not looked up: torch's own looks up by 64-bit integers only.
        scores = F.log_softmax(output.next_sentence.float(), -1)
        answer = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
        nsp = -torch.where(answer == batch["next_sentence"][:, None], scores, 0.0).sum()
        return {"mlm": (self.head(output, batch["labels"]), counts["mlm"]), "nsp": (nsp, counts["nsp"])}


class OwnLoss:
    """A user's function (output, batch) -> (sum, count). Its count is known only afterwards and divides last."""

    names = ("loss",)

    def __init__(self, function: LossFunction) -> None:
        self.function = function

    def counts(self, batch: Batch) -> None:
        return None

    def terms(self, output: Output, batch: Batch) -> Terms:
        total, count = pair(self.function(output, batch), self.function)
        return {"loss": (total, count)}


def loss_of(family: str, head: Head) -> Loss:
    """What a family is trained by, unless a user's own function is."""
    return BertLoss(head) if family == "bert" else CausalLoss(head)


def counted(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum().float()

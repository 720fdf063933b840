"""Next-token cross entropy."""

from typing import TYPE_CHECKING

from trainyard.train.loss import Loss, LossTerms, count_labels

if TYPE_CHECKING:
    from torch import Tensor

    from trainyard.models import Batch, ModelOutput


class CausalLoss(Loss):
    term_names = ("lm",)
    is_causal = True

    def label_counts(self, batch: "Batch") -> "list[Tensor]":
        return [count_labels(batch["labels"])]

    def terms(self, output: "ModelOutput", batch: "Batch") -> LossTerms:
        return {"lm": (self.head_loss(output, batch["labels"]), count_labels(batch["labels"]))}


LOSS = CausalLoss

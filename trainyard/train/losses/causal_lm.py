"""Next-token cross entropy."""

from typing import TYPE_CHECKING

from trainyard.train.loss import Loss, LossTerms, count_labels

if TYPE_CHECKING:
    from torch import Tensor

    from trainyard.models import Batch, ModelConfig, ModelOutput


class CausalLoss(Loss):
    term_names = ("lm",)
    is_causal = True

    def label_counts(self, batch: "Batch") -> "list[Tensor]":
        return [count_labels(batch["labels"])]

    def configure(self, model: "ModelConfig") -> None:
        self.metric_names = ("mtp",) if model.mtp_blocks else ()

    def terms(self, output: "ModelOutput", batch: "Batch") -> LossTerms:
        import torch

        total, count = self.head_loss(output, batch["labels"]), count_labels(batch["labels"])
        if not output.further:
            return {"lm": (total, count)}
        # Predictions of further tokens add to the gradients only: the loss stays comparable with that of other models.
        further = [self.head_loss(each, labels) for each, labels in output.further]
        added = torch.stack(further).mean() * output.further_weight
        counts = torch.stack([count_labels(labels) for _, labels in output.further])
        sums = torch.stack(further).detach().sum(), counts.sum()
        return {"lm": (total + (added - added.detach()), count), "mtp": sums}


LOSS = CausalLoss

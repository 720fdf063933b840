"""Masked-token cross entropy plus next-sentence cross entropy, each divided by its own count."""

from typing import TYPE_CHECKING

from trainyard.train.loss import Loss, LossTerms, count_labels

if TYPE_CHECKING:
    from torch import Tensor

    from trainyard.models import Batch, ModelOutput


class BertLoss(Loss):
    term_names = ("mlm", "nsp")

    def label_counts(self, batch: "Batch") -> "list[Tensor]":
        return [count_labels(batch["labels"]), count_labels(batch["next_sentence_labels"])]

    def terms(self, output: "ModelOutput", batch: "Batch") -> LossTerms:
        import torch
        import torch.nn.functional as F

        assert output.next_sentence is not None
        # Compares indices instead of gathering: torch's gather-based loss takes 64-bit indices only.
        scores = F.log_softmax(output.next_sentence.float(), -1)
        answer = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
        nsp = -torch.where(answer == batch["next_sentence_labels"][:, None], scores, 0.0).sum()
        sums = (self.head_loss(output, batch["labels"]), nsp)
        return dict(zip(self.term_names, zip(sums, self.label_counts(batch), strict=True), strict=True))


LOSS = BertLoss

"""Losses of pairs of answers to a prompt, of which one is preferred.

A pair is two documents of one sample: an even one, the chosen answer with its prompt, and the rejected one after it.
Labels are those of the answers. The log-probability of an answer is the sum over its labels, wherever its tokens are:
context-parallel ranks add up theirs. No torch at the top: configurations name an objective.
"""

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.train.loss import LossTerms
from trainyard.train.objective import Objective, Preparation

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from trainyard.models import Batch, ModelOutput
    from trainyard.train.micro_batches.runner import MicroBatchRunner


class PairScores(NamedTuple):
    """Of each pair [B, P]; zeros where a sample has fewer."""

    chosen: "Tensor"
    """Log-probability of the chosen answer."""
    rejected: "Tensor"
    chosen_tokens: "Tensor"
    """Labels of the answer."""
    rejected_tokens: "Tensor"
    reference_chosen: "Tensor"
    """What the reference gave; zeros without one."""
    reference_rejected: "Tensor"
    margins: "Tensor | float" = 0.0
    """By how much the record wants the reward of the chosen answer to be larger."""
    counterparts: "Tensor | float" = 0.0
    """[B, P, 2] what the answers are compared with instead of each other, for variants that sort a batch."""


class PairLoss(Objective):
    """What is minimized over pairs. A subclass is an objective: `train.objective` names it."""

    samples, sections = "pairs", ("preference",)
    term_names: tuple[str, ...] = ("pair",)
    metric_names: tuple[str, ...] = (
        *("rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy"),
        *("log_probs/chosen", "log_probs/rejected"),
    )
    trains_likelihood: ClassVar[bool] = False
    """It has a second term, `likelihood`: the cross entropy of the chosen answers, by `likelihood_weight`."""
    needs_reference: bool = False
    """It compares with the log-probabilities of a reference, which batches have."""
    add_live_scores: "Callable[[MicroBatchRunner, PairLoss, list[Batch], Tensor], None] | None" = None
    """Computes these at each step, as `LiveReference` does; None: they are stored."""

    def views(self, batch: "Batch") -> "list[Batch]":
        """The batches that together have all answers to which a reference gives scores."""
        return [batch]

    def pair_losses(self, scores: PairScores) -> "Tensor":
        """The loss of each pair [B, P]."""
        raise NotImplementedError

    def rewards(self, scores: PairScores) -> "tuple[Tensor, Tensor]":
        """What the objective makes larger for the chosen answer, and smaller for the rejected one [B, P]."""
        beta = self.options["beta"]
        chosen, rejected = scores.chosen - scores.reference_chosen, scores.rejected - scores.reference_rejected
        return beta * chosen.detach(), beta * rejected.detach()

    def stand_in(self, batch: "Batch") -> "Batch":
        if not self.needs_reference:
            return batch
        return {**batch, "reference_scores": -64 - (batch["pair_keys"] % 64).float()}

    @property
    def is_live(self) -> bool:
        """The scores of its reference are computed at each step."""
        return self.needs_reference and self.options.get("reference") == "live"

    def preparation(self) -> Preparation:
        return Preparation(keeps_weights=self.is_live, forward_passes=int(self.is_live))

    def prepare(self, runner: "MicroBatchRunner", batches: "list[Batch]", rng_key: "Tensor") -> None:
        if self.add_live_scores:
            self.add_live_scores(runner, self, batches, rng_key)

    def label_counts(self, batch: "Batch") -> "list[Tensor]":
        counts = [is_pair(batch).sum().float()]
        if self.trains_likelihood:
            is_chosen = (batch["labels"] != IGNORE_INDEX) & (batch["document_ids"] % 2 == 0)
            counts.append(is_chosen.sum().float())
        return counts

    def terms(self, output: "ModelOutput", batch: "Batch") -> LossTerms:
        scores, real = self.scores(output, batch), is_pair(batch)
        count, *others = self.label_counts(batch)
        chosen, rejected = self.rewards(scores)
        values = {
            "pair": self.pair_losses(scores),
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margin": chosen - rejected,
            "rewards/accuracy": (chosen > rejected).float(),
            "log_probs/chosen": scores.chosen.detach(),
            "log_probs/rejected": scores.rejected.detach(),
        }
        names = ("pair", *self.metric_names)
        terms = {name: (values[name].where(real, 0.0).sum(), count) for name in names}
        if self.trains_likelihood:
            likelihood = -scores.chosen.where(real, 0.0).sum()
            terms["likelihood"] = (self.options["likelihood_weight"] * likelihood, *others)
        return terms

    def scores(self, output: "ModelOutput", batch: "Batch") -> PairScores:
        sums = answer_sums(self.token_losses(output, batch), output, batch)
        reference = batch.get("reference_scores")
        if reference is None and self.needs_reference:
            raise UserError("the objective compares with a reference, whose scores the batch does not have")
        if reference is None:
            reference = sums[..., 0].detach().new_zeros(sums.shape[:2])
        (chosen, rejected), tokens, references = (
            each.view(len(sums), -1, 2).unbind(-1) for each in (-sums[..., 0], sums[..., 1].detach(), reference)
        )
        margins, counterparts = batch.get("margins", 0.0), batch.get("counterparts", 0.0)
        return PairScores(chosen, rejected, tokens[0], tokens[1], references[0], references[1], margins, counterparts)

    def token_losses(self, output: "ModelOutput", batch: "Batch") -> "Tensor":
        """[B, T] what a label adds to the loss of its answer."""
        return self.head_loss(output, batch["labels"], per_token=True)


def answer_sums(losses: "Tensor", output: "ModelOutput", batch: "Batch") -> "Tensor":
    """[B, 2 P, 2] summed loss and number of labels of each answer of a sample, from the losses of its tokens [B, T]."""
    import torch

    answers = torch.arange(batch["pair_keys"].shape[1], dtype=torch.int32, device=losses.device)
    labeled = batch["labels"] != IGNORE_INDEX
    of_answer = (batch["document_ids"][..., None] == answers) & labeled[..., None]
    parts = torch.stack((losses[..., None].where(of_answer, 0.0).sum(1), of_answer.sum(1).to(losses.dtype)), -1)
    return output.cp.sum(parts)


def is_pair(batch: "Batch") -> "Tensor":
    """[B, P] bool. Of context-parallel ranks, which have the same pairs, only the first one counts them."""
    keys = batch["pair_keys"]
    return (keys.view(len(keys), -1, 2) != 0).any(-1)

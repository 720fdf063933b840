"""Contrastive preference optimization: DPO without a reference, and the likelihood of the chosen answer."""

from typing import TYPE_CHECKING, Any, ClassVar

from trainyard.train.objectives.dpo import losses_of_rewards
from trainyard.train.pair_loss import PairLoss, PairScores

if TYPE_CHECKING:
    from torch import Tensor


class Cpo(PairLoss):
    term_names = ("pair", "likelihood")
    trains_likelihood = True
    variants = ("sigmoid", "hinge", "ipo")
    defaults: ClassVar[dict[str, Any]] = {
        "beta": 0.1,
        "variant": "sigmoid",
        "label_smoothing": 0.0,
        "likelihood_weight": 1.0,
    }

    def pair_losses(self, scores: PairScores) -> "Tensor":
        return losses_of_rewards(scores, scores.chosen, scores.rejected, self.options)


OBJECTIVE = Cpo

"""A reward model (Bradley-Terry): the probability that an answer is preferred follows from the scores of both."""

from typing import TYPE_CHECKING, Any, ClassVar

from trainyard.config.preference_schema import SampleKind
from trainyard.train.pair_loss import PairLoss, PairScores

if TYPE_CHECKING:
    from torch import Tensor

    from trainyard.models import Batch, ModelOutput


class Reward(PairLoss):
    """The score of an answer is that of its last token."""

    metric_names = ("rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy")
    kind = SampleKind(scores_ends=True)
    defaults: ClassVar[dict[str, Any]] = {"center_weight": 0.0}

    def token_losses(self, output: "ModelOutput", batch: "Batch") -> "Tensor":
        from torch.nn.functional import linear

        return -linear(output.hidden, output.weight)[..., 0].float()

    def pair_losses(self, scores: PairScores) -> "Tensor":
        from torch.nn.functional import logsigmoid

        centered = (scores.chosen + scores.rejected).square()
        margin = scores.chosen - scores.rejected - scores.margins
        return self.options["center_weight"] * centered - logsigmoid(margin)

    def rewards(self, scores: PairScores) -> "tuple[Tensor, Tensor]":
        return scores.chosen.detach(), scores.rejected.detach()


OBJECTIVE = Reward

"""Direct preference optimization: the answer's log-probability against that of a reference, as a reward."""

from collections.abc import Callable, Mapping
from math import log
from typing import TYPE_CHECKING, Any, ClassVar

from trainyard.train.loss import HeadLoss
from trainyard.train.pair_loss import PairLoss, PairScores

if TYPE_CHECKING:
    from torch import Tensor

    from trainyard.config.preference_schema import PreferenceSection


def losses_of_rewards(scores: PairScores, chosen: "Tensor", rejected: "Tensor", options: Mapping[str, Any]) -> "Tensor":
    """The loss of each pair from log-probabilities, perhaps relative to those of a reference."""
    beta, variant = options["beta"], options["variant"]
    if variant in OF_MEANS:  # over tokens, so that length does not matter
        chosen = chosen / scores.chosen_tokens.clamp(min=1)
        rejected = rejected / scores.rejected_tokens.clamp(min=1)
    return VARIANTS[variant](beta * chosen, beta * rejected, beta, options["label_smoothing"])


def cost(reward: "Tensor") -> "Tensor":
    """-log sigmoid."""
    from torch.nn.functional import softplus

    return softplus(-reward)


def _exo(chosen: "Tensor", rejected: "Tensor", beta: float, noise: float) -> "Tensor":
    """The divergence of the model's preference from that of labels with `noise`."""
    right = chosen - rejected
    terms = ((right, 1 - noise), (-right, noise))
    first, second = (reward.sigmoid() * (-cost(reward) - log(share)) for reward, share in terms)
    return first + second


def _discopop(chosen: "Tensor", rejected: "Tensor", beta: float, noise: float) -> "Tensor":
    """A mixture of the logistic and the exponential loss, by a gate of temperature 0.05."""
    margin = chosen - rejected
    gate = (margin / 0.05).sigmoid()
    return (1 - gate) * cost(margin) + gate * (-margin).exp()


VARIANTS: dict[str, "Callable[[Tensor, Tensor, float, float], Tensor]"] = {
    "sigmoid": lambda c, r, beta, noise: (1 - noise) * cost(c - r) + noise * cost(r - c),
    "sigmoid_norm": lambda c, r, beta, noise: (1 - noise) * cost(c - r) + noise * cost(r - c),
    "robust": lambda c, r, beta, noise: ((1 - noise) * cost(c - r) - noise * cost(r - c)) / (1 - 2 * noise),
    "hinge": lambda c, r, beta, noise: (1 - (c - r)).relu(),
    "ipo": lambda c, r, beta, noise: ((c - r) / beta - 1 / (2 * beta)).square(),
    "exo_pair": _exo,
    "nca_pair": lambda c, r, beta, noise: cost(c) + (cost(-c) + cost(-r)) / 2,
    "bco_pair": lambda c, r, beta, noise: cost(c) + cost(-r),
    "sppo_hard": lambda c, r, beta, noise: ((c - 0.5) / beta).square() + ((r + 0.5) / beta).square(),
    "apo_zero": lambda c, r, beta, noise: (-c).sigmoid() + r.sigmoid(),
    "apo_down": lambda c, r, beta, noise: c.sigmoid() + (r - c).sigmoid(),
    "discopop": _discopop,
}
"""Losses of the rewards of both answers, beta and label smoothing, by their names in TRL."""
OF_MEANS = ("sigmoid_norm", "ipo")


class Dpo(PairLoss):
    needs_reference = True
    variants = tuple(VARIANTS)
    defaults: ClassVar[dict[str, Any]] = {
        "beta": 0.1,
        "variant": "sigmoid",
        "label_smoothing": 0.0,
        "reference": "stored",
        "reference_free": False,
    }

    def __init__(self, head_loss: HeadLoss | None, options: "PreferenceSection") -> None:
        super().__init__(head_loss, options)
        self.needs_reference = not self.options["reference_free"]

    @classmethod
    def check(cls, given: Mapping[str, Any]) -> None:
        super().check(given)
        if given.get("variant") == "exo_pair" and not given.get("label_smoothing"):
            raise ValueError("preference.variant=exo_pair: needs preference.label_smoothing; nearest: 0.001")

    def pair_losses(self, scores: PairScores) -> "Tensor":
        chosen, rejected = scores.chosen - scores.reference_chosen, scores.rejected - scores.reference_rejected
        return losses_of_rewards(scores, chosen, rejected, self.options)


OBJECTIVE = Dpo

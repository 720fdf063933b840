"""GRPO and its variants: completions of a prompt are compared with each other, and each token is clipped."""

from typing import TYPE_CHECKING, Any, ClassVar

from trainyard.train.policy_loss import PolicyLoss, centered, standard_deviation

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-4
"""TRL's. Added to standard deviations, so that equal rewards have advantages of 0."""


class Grpo(PolicyLoss):
    defaults: ClassVar[dict[str, Any]] = {
        "clip": 0.2,
        "clip_high": None,
        "kl": 0.0,
        "scale": "group",
        "average": "tokens",
        "ratio": "token",
    }

    def advantages(self, rewards: "Tensor") -> "Tensor":
        scale, values = self.options["scale"], centered(rewards)
        if scale == "none":
            return values.nan_to_num(0.0)
        deviation = standard_deviation(rewards if scale == "group" else rewards.flatten())
        return (values / (deviation + EPSILON)).nan_to_num(0.0)


OBJECTIVE = Grpo

"""RLOO: each completion is compared with the mean of the others of its prompt, and clipped as a whole."""

from typing import TYPE_CHECKING, Any, ClassVar

from trainyard.train.policy_loss import PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor


class Rloo(PolicyLoss):
    sums_log_ratios = True
    penalizes_tokens = False
    defaults: ClassVar[dict[str, Any]] = {"clip": 0.2, "clip_high": None, "kl": 0.0}

    def advantages(self, rewards: "Tensor") -> "Tensor":
        others = (~rewards.isnan()).sum(1, keepdim=True) - 1
        baselines = (rewards.nansum(1, True) - rewards) / others  # NaN for one alone
        return (rewards - baselines).nan_to_num(0.0)


OBJECTIVE = Rloo

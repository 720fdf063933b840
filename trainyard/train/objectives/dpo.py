"""Direct preference optimization: the answer's log-probability against that of a reference, as a reward."""

from collections.abc import Callable, Mapping
from math import log
from typing import TYPE_CHECKING, Any, ClassVar

from trainyard.core.errors import UserError
from trainyard.train.loss import HeadLoss
from trainyard.train.objective import Preparation
from trainyard.train.pair_loss import PairLoss, PairScores, is_pair

if TYPE_CHECKING:
    from torch import Tensor

    from trainyard.config.preference_schema import PreferenceSection
    from trainyard.models import Batch
    from trainyard.train.micro_batches.runner import MicroBatchRunner


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
SORTED = ("aot", "aot_unpaired")
"""Variants that compare the distributions of a global batch: the k-th smallest log-ratio of one answer with the k-th
smallest of the other one, or that of the pairs with that of the reference's."""
PAIR_COLUMNS = ("chosen", "rejected", "reference chosen", "reference rejected", "is a pair")
"""What they need of each pair of the global batch."""


def sorted_counterparts(scores: "Tensor", references: "Tensor", real: "Tensor", variant: str) -> "Tensor":
    """[N, 2] what chosen and rejected answers are compared with, from the scores of all pairs [N, 2] and those of the
    reference. Of aot, the first is the margin of the reference."""
    import torch

    def partners(values: "Tensor", others: "Tensor") -> "Tensor":
        places = values.masked_fill(~real, torch.inf).argsort(stable=True).argsort()
        return others.masked_fill(~real, torch.inf).sort().values[places].where(real, 0.0)

    if variant == "aot":
        found = partners(scores[:, 0] - scores[:, 1], references[:, 0] - references[:, 1])
        return torch.stack((found, torch.zeros_like(found)), 1)
    chosen, rejected = (scores - references).unbind(1)
    return torch.stack((partners(chosen, rejected), partners(rejected, chosen)), 1)


class Dpo(PairLoss):
    needs_reference = True
    variants = (*VARIANTS, *SORTED)
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

    def preparation(self) -> Preparation:
        found = super().preparation()
        if self.options["variant"] not in SORTED:
            return found
        return found._replace(forward_passes=found.forward_passes + 1, gathered=len(PAIR_COLUMNS))

    def prepare(self, runner: "MicroBatchRunner", batches: "list[Batch]", rng_key: "Tensor") -> None:
        super().prepare(runner, batches, rng_key)
        if self.options["variant"] in SORTED:
            self._add_counterparts(runner, batches, rng_key)

    def _add_counterparts(self, runner: "MicroBatchRunner", batches: "list[Batch]", rng_key: "Tensor") -> None:
        """Find what each answer meets when all pairs of the global batch are sorted."""
        import torch

        from trainyard.train.reference_scores import batch_scores

        scores = torch.cat([each.view(-1, 2) for each in batch_scores(runner, self, batches, rng_key)])
        references = torch.zeros_like(scores)
        if self.needs_reference:
            references = torch.cat([batch["reference_scores"].view(-1, 2) for batch in batches]).to(scores)
        real = torch.cat([is_pair(batch).view(-1, 1) for batch in batches]).to(scores)
        group, count = runner.mesh.dp_cp, len(scores)
        columns = torch.cat((scores, references, real), 1).contiguous()
        assert columns.shape[1] == len(PAIR_COLUMNS)
        every = group.all_gather(columns)
        found = sorted_counterparts(every[:, :2], every[:, 2:4], every[:, 4] > 0, self.options["variant"])
        own = found[group.rank * count :][:count]
        sizes = [batch["pair_keys"].numel() // 2 for batch in batches]
        for batch, part in zip(batches, torch.split(own, sizes), strict=True):
            batch["counterparts"] = part.view(len(batch["pair_keys"]), -1, 2)

    def pair_losses(self, scores: PairScores) -> "Tensor":
        chosen, rejected = scores.chosen - scores.reference_chosen, scores.rejected - scores.reference_rejected
        if self.options["variant"] in SORTED:
            return self._sorted_losses(scores, chosen, rejected)
        return losses_of_rewards(scores, chosen, rejected, self.options)

    def _sorted_losses(self, scores: PairScores, chosen: "Tensor", rejected: "Tensor") -> "Tensor":
        from torch import Tensor

        if not isinstance(scores.counterparts, Tensor):
            raise UserError(f"preference.variant={self.options['variant']}: its pairs of a step are not sorted")
        first, second = scores.counterparts.unbind(-1)

        def loss(margin: "Tensor") -> "Tensor":
            beta, noise = self.options["beta"], self.options["label_smoothing"]
            return VARIANTS["sigmoid"](beta * margin, beta * 0 * margin, beta, noise)

        if self.options["variant"] == "aot":
            return loss(scores.chosen - scores.rejected - first)
        # Each pair of the sorted answers is met twice, for the gradient of one answer each; its loss counts once.
        of_rejected = loss(second - rejected)
        return loss(chosen - first) + of_rejected - of_rejected.detach()


OBJECTIVE = Dpo

"""KTO: answers with a label instead of pairs, each against the reference and what the model prefers on average."""

from typing import TYPE_CHECKING, Any, ClassVar, cast

from trainyard.config.preference_schema import SampleKind
from trainyard.train.loss import HeadLoss, LossTerms
from trainyard.train.objective import Preparation
from trainyard.train.pair_loss import PairLoss, is_pair

if TYPE_CHECKING:
    from torch import Tensor

    from trainyard.config.preference_schema import PreferenceSection
    from trainyard.models import Batch, ModelOutput


class Kto(PairLoss):
    """A sample has answers instead of pairs, each an even document. Its odd documents are in fields of their own, whose
    names begin with MISMATCH: each prompt with the answer to another one. By how much the model finds those likelier
    than the reference does, on average over the global batch, is the reward that no answer earned (KL)."""

    term_names = ("answer",)
    metric_names = ("rewards/chosen", "rewards/rejected", "log_probs/chosen", "log_probs/rejected", "kl")
    needs_reference = True
    kind = SampleKind(unpaired=True)
    variants = ("kto", "apo_zero_unpaired")
    defaults: ClassVar[dict[str, Any]] = {
        "beta": 0.1,
        "variant": "kto",
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
        "reference": "stored",
    }

    def __init__(self, head_loss: HeadLoss | None, options: "PreferenceSection") -> None:
        super().__init__(head_loss, options)
        self.kl: Tensor | float = 0.0
        """Of the batch. A tensor keeps its address, so that CUDA graphs can read it."""

    @classmethod
    def sample_kind(cls, options: Any) -> SampleKind:
        return cls.kind._replace(mismatches=options.variant in (None, "kto"))

    def preparation(self) -> Preparation:
        found = super().preparation()
        if self.options["variant"] != "kto":
            return found
        return found._replace(forward_passes=VIEWS * found.forward_passes + 1, summed=KL_VALUES)

    def views(self, batch: "Batch") -> "list[Batch]":
        return [batch, mismatched(batch)] if f"{MISMATCH}tokens" in batch else [batch]

    def prepare(self, runner: Any, batches: "list[Batch]", rng_key: "Tensor") -> None:
        """Compute the KL of a batch: it is inside of a loss that is not linear, so all of it comes first."""
        import torch

        from trainyard.train.step import LossAccumulator

        super().prepare(runner, batches, rng_key)
        if f"{MISMATCH}tokens" not in batches[0]:
            return
        sums = LossAccumulator(["kl"], rng_key.device, runner.mesh)

        def collect(output: "ModelOutput", micro: "Batch") -> "Tensor":
            scores, real = self.scores(output, micro), is_pair(micro)
            difference = scores.rejected - scores.reference_rejected
            sums.add({"kl": (difference.where(real, 0.0).sum(), real.sum().float())})
            return sums.values[0, 0]

        with torch.no_grad(), runner.eval_mode():
            runner([mismatched(batch) for batch in batches], rng_key, collect, backward=False)
            total, count, _ = sums.all_reduce(rng_key.new_zeros(0, dtype=torch.float32))
        if isinstance(self.kl, float):
            self.kl = torch.zeros((), device=rng_key.device)
        self.kl.copy_((total / count.clamp(min=1))[0].clamp(min=0))

    def label_counts(self, batch: "Batch") -> "list[Tensor]":
        return [is_pair(batch).sum().float()]

    def terms(self, output: "ModelOutput", batch: "Batch") -> LossTerms:
        scores, real = self.scores(output, batch), is_pair(batch)
        reward = self.options["beta"] * (scores.chosen - scores.reference_chosen)
        good, bad = real & (batch["answer_labels"] > 0), real & (batch["answer_labels"] == 0)
        unearned = reward - self.options["beta"] * self.kl
        weighted = self.options["desirable_weight"] * (-unearned).sigmoid().where(good, 0.0)
        weighted = weighted + self.options["undesirable_weight"] * unearned.sigmoid().where(bad, 0.0)
        count = real.sum().float()
        terms = {"answer": (weighted.sum(), count), "kl": (self.kl * count, count)}
        for name, members in (("chosen", good), ("rejected", bad)):
            for metric, value in (("rewards", reward), ("log_probs", scores.chosen)):
                terms[f"{metric}/{name}"] = (value.detach().where(members, 0.0).sum(), members.sum().float())
        return terms


MISMATCH = "kl_"
VIEWS = 2
"""Of a batch: its answers, and those to other prompts."""
KL_VALUES = 2
"""That ranks sum: the KL of their answers, and how many these are."""


def mismatched(batch: "Batch") -> "Batch":
    """The batch with the answers to other prompts as its tokens."""
    fields = cast("dict[str, Tensor]", batch)
    others = {name.removeprefix(MISMATCH): field for name, field in fields.items() if name.startswith(MISMATCH)}
    own = {name: field for name, field in fields.items() if not name.startswith(MISMATCH)}
    return cast("Batch", {**own, **others})


OBJECTIVE = Kto

"""Losses of completions that the model wrote itself, with rewards that others gave them.

A sample is a prompt with one completion; labels are the tokens that the model sampled, not those of a prompt or a tool.
`old_log_probs` are what the sampler gave each of them. The ratio of a token is its probability now over the one then:
the sampler's own number, so what its arithmetic differs from the trainer's is corrected, too. No torch at the top:
configurations name an objective.
"""

from typing import TYPE_CHECKING, Any, ClassVar

from trainyard.core.constants import IGNORE_INDEX
from trainyard.train.loss import HeadLoss, LossTerms
from trainyard.train.objective import Objective, Preparation

if TYPE_CHECKING:
    from torch import Tensor

    from trainyard.config.rollout_schema import PolicySection, RolloutSection
    from trainyard.models import Batch, ModelOutput


class PolicyLoss(Objective):
    """What is minimized over rollouts. A subclass is an objective: `train.objective` names it."""

    samples, sections = "prompts", ("policy", "rollout")
    term_names: tuple[str, ...] = ("policy",)
    penalizes_tokens: ClassVar[bool] = True
    """The divergence from the reference is in the loss of each token; otherwise rewards have it."""
    sums_log_ratios: ClassVar[bool] = False
    """The ratio of a completion is that of its probability, not the mean over its tokens."""

    def __init__(self, head_loss: HeadLoss | None, options: "PolicySection", rollout: "RolloutSection") -> None:
        super().__init__(head_loss, options)
        self.temperature, self.max_new_tokens = rollout.temperature, rollout.max_new_tokens
        self.clip = self.options["clip"]
        self.clip_high = self.options["clip_high"] or self.clip
        self.kl: float = self.options["kl"]
        names = [path.partition(":")[2] for path in rollout.rewards]
        names = [
            path if [*names, "total"].count(name) > 1 else name
            for name, path in zip(names, rollout.rewards, strict=True)
        ]
        self.stat_names = ("rewards/total", *(f"rewards/{name}" for name in names), "completions/finished")
        """What batches have about each completion, in the columns of `completion_stats`."""
        self.has_kl = bool(self.kl) and self.penalizes_tokens
        of_tokens = (*(("kl",) if self.has_kl else ()), "clipped", "log_probs/sampled", "log_probs/difference")
        self.metric_names = (*self.stat_names, "completions/length", *of_tokens)

    def advantages(self, rewards: "Tensor") -> "Tensor":
        """What each completion is worth [prompts, completions], from the rewards of a batch of rollouts. NaN: no
        reward applies to it. Nothing is compared with it, and it is worth 0: it still counts in the mean of the loss,
        and its divergence from the reference trains."""
        raise NotImplementedError

    def preparation(self) -> Preparation:
        return Preparation(keeps_weights=bool(self.kl))

    def stand_in(self, batch: "Batch") -> "Batch":
        samples, tokens = batch["sample_ids"].float(), batch["tokens"]
        log_probs = samples.new_full(tokens.shape, -3.0)
        return {
            **batch,
            "labels": tokens.roll(-1, 1),
            "old_log_probs": log_probs,
            "reference_log_probs": log_probs,
            "advantages": samples % 3 + 1,
            "completion_stats": samples[:, None].expand(-1, len(self.stat_names)).contiguous(),
        }

    def label_counts(self, batch: "Batch") -> "list[Tensor]":
        return [self._count(self.token_weights(batch["labels"]))]

    def _count(self, weights: "Tensor") -> "Tensor":
        """Of tokens with these weights, what the loss is divided by: tokens, or completions."""
        if self.options.get("average") == "tokens":
            return weights.sum()
        return weights.new_tensor(float(len(weights)))

    def token_weights(self, labels: "Tensor") -> "Tensor":
        """How much each token counts [B, T], in units of `label_counts`."""
        is_label = (labels != IGNORE_INDEX).float()
        average = self.options.get("average")
        if average == "tokens":
            return is_label
        return is_label / (self.max_new_tokens if average == "max_tokens" else is_label.sum(1, True).clamp(min=1))

    def terms(self, output: "ModelOutput", batch: "Batch") -> LossTerms:
        labels = batch["labels"]
        is_label = labels != IGNORE_INDEX
        log_probs = -self.head_loss(output.at_temperature(self.temperature), labels, per_token=True)
        log_ratios = (log_probs - batch["old_log_probs"]).where(is_label, 0.0)
        ratios = self.ratios(log_ratios, is_label).exp()
        advantages = batch["advantages"][:, None]
        low, high = 1 - self.clip, 1 + self.clip_high
        losses = -(ratios * advantages).minimum(ratios.clamp(low, high) * advantages)
        is_clipped = ((ratios < low) & (advantages < 0)) | ((ratios > high) & (advantages > 0))
        values: dict[str, Any] = {
            "clipped": is_clipped.float(),
            "log_probs/sampled": log_probs.detach(),
            "log_probs/difference": log_ratios.detach().abs(),
        }
        if self.has_kl:
            difference = (batch["reference_log_probs"] - log_probs).where(is_label, 0.0)
            # An estimate that is never negative, and by the ratio unbiased under the weights of now.
            divergence = ratios * (difference.exp() - difference - 1)
            losses, values["kl"] = losses + self.kl * divergence, divergence.detach()
        weights, tokens = self.token_weights(labels), is_label.sum().float()
        count = self._count(weights)
        terms = {name: (value.where(is_label, 0.0).sum(), tokens) for name, value in values.items()}
        stats, samples = batch["completion_stats"], count.new_tensor(float(len(labels)))
        for column, name in enumerate(self.stat_names):
            known = ~stats[:, column].isnan()  # a reward may not apply
            terms[name] = (stats[:, column].where(known, 0.0).sum(), known.sum().float())
        terms["completions/length"] = (tokens, samples)
        return {**terms, "policy": ((losses * weights).where(is_label, 0.0).sum(), count)}

    def ratios(self, log_ratios: "Tensor", is_label: "Tensor") -> "Tensor":
        """Logarithms of the ratios that weigh each token [B, T]."""
        if not self.sums_log_ratios and self.options.get("ratio") != "completion":
            return log_ratios
        sums = log_ratios.sum(1, True)
        if not self.sums_log_ratios:
            sums = sums / is_label.sum(1, True).clamp(min=1)
        return sums.expand_as(log_ratios)


def centered(rewards: "Tensor") -> "Tensor":
    """Rewards [prompts, completions] less the mean of their prompt."""
    return rewards - rewards.nanmean(1, True)


def standard_deviation(rewards: "Tensor") -> "Tensor":
    """Of the last dimension, without NaNs and with Bessel's correction; 0 of fewer than two numbers."""
    count = (~rewards.isnan()).sum(-1, keepdim=True)
    squares = (rewards - rewards.nanmean(-1, True)).square().nansum(-1, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()

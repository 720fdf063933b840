"""The `preference` section of the configuration, and the samples that its objectives need."""

from typing import Any, Literal, NamedTuple

from pydantic import Field

from trainyard.config.registries import OBJECTIVES
from trainyard.core.section import Section


class PreferenceSection(Section):
    """How answers are compared, or each is judged (train.objective). Defaults depend on the objective."""

    beta: float | None = Field(None, gt=0)
    """Scale of rewards: how far the model may move from the reference, or how much the odds ratio counts. Default: 0.1;
    simpo 2."""
    variant: str | None = None
    """The loss of rewards. dpo: sigmoid, sigmoid_norm, robust, hinge, ipo, exo_pair, nca_pair, bco_pair, sppo_hard,
    apo_zero, apo_down, discopop, aot or aot_unpaired; cpo: sigmoid, hinge or ipo; kto: kto or apo_zero_unpaired. robust
    is unbiased if preference.label_smoothing is the probability of a wrong label; ipo and sigmoid_norm take means over
    tokens; aot and aot_unpaired sort the pairs of the global batch. Default: the first one."""
    label_smoothing: float | None = Field(None, ge=0, lt=0.5)
    """dpo, cpo, simpo: probability that the rejected answer is the better one. Default: 0."""
    reference: Literal["stored", "live"] | None = None
    """dpo, kto: where the log-probabilities of the reference come from. stored: computed once, before the first step,
    and kept; live: computed at each step, from a copy of the trained weights of step 0. Default: stored."""
    reference_free: bool | None = None
    """dpo: compare log-probabilities as they are, as if the reference found all answers equally likely. Default:
    false."""
    margin: float | None = Field(None, ge=0)
    """simpo: by how much the reward of the chosen answer shall be larger (gamma). Default: 1."""
    center_weight: float | None = Field(None, ge=0)
    """reward: weight of the square of the sum of both scores, which keeps their mean near 0; 0.01 is usual. Default:
    0."""
    desirable_weight: float | None = Field(None, ge=0)
    """kto: weight of the loss of good answers. Default: 1."""
    undesirable_weight: float | None = Field(None, ge=0)
    """kto: weight of the loss of the others. Default: 1."""
    likelihood_weight: float | None = Field(None, ge=0)
    """cpo and orpo: weight of the cross entropy of the chosen answers. Default: 1."""


class SampleKind(NamedTuple):
    """What an objective needs of samples."""

    scores_ends: bool = False
    """Labels and margins at the last tokens of answers: of a reward model."""
    unpaired: bool = False
    """Single answers."""
    mismatches: bool = False
    """Answers to other prompts, too."""


def sample_kind(config: Any) -> SampleKind:
    kind: SampleKind = OBJECTIVES.find(config.train.objective).sample_kind(config.preference)
    return kind

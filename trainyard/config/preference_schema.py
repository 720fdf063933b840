"""The `preference` section of the configuration."""

from pydantic import Field

from trainyard.core.section import Section


class PreferenceSection(Section):
    """How answers are compared (train.objective=dpo, simpo, cpo or orpo). Defaults depend on the objective."""

    beta: float | None = Field(None, gt=0)
    """Scale of rewards: how far the model may move from the reference, or how much the odds ratio counts. Default: 0.1;
    simpo 2."""
    variant: str | None = None
    """The loss of both rewards. dpo: sigmoid, sigmoid_norm, robust, hinge, ipo, exo_pair, nca_pair, bco_pair,
    sppo_hard, apo_zero, apo_down or discopop; cpo: sigmoid, hinge or ipo. robust is unbiased if
    preference.label_smoothing is the probability of a wrong label; ipo and sigmoid_norm take means over tokens.
    Default: sigmoid."""
    label_smoothing: float | None = Field(None, ge=0, lt=0.5)
    """dpo, cpo, simpo: probability that the rejected answer is the better one. Default: 0."""
    margin: float | None = Field(None, ge=0)
    """simpo: by how much the reward of the chosen answer shall be larger (gamma). Default: 1."""
    likelihood_weight: float | None = Field(None, ge=0)
    """cpo and orpo: weight of the cross entropy of the chosen answers. Default: 1."""

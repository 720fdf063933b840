"""The `rollout` and `policy` sections of the configuration: completions that the model writes itself, and how they
train it."""

from typing import Annotated, Literal

from pydantic import Field, Strict

from trainyard.core.section import ONE_OR_MORE, FunctionPath, NonNegativeInt, PositiveInt, Section


class RolloutSection(Section):
    """Completions of prompts, written by the model that trains (train.objective=grpo or rloo)."""

    rewards: Annotated[tuple[FunctionPath, ...], Strict(False), ONE_OR_MORE] = ()
    """Reward functions, `module:function`. Each takes (prompts, completions, **columns) and returns a number for each
    completion, or None where it does not apply; columns are the keys of the records."""
    weights: Annotated[tuple[float, ...], Strict(False)] = ()
    """A weight for each of rollout.rewards, whose weighted sum is the reward. Default: 1."""
    completions: Annotated[int, Field(ge=2)] = 8
    """Completions of each prompt, which are compared with each other."""
    max_new_tokens: PositiveInt = 256
    """Longest completion; with rollout.tool, of each turn."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits, of the sampler and of the loss."""
    top_k: NonNegativeInt = 0
    """Sample among this many of the most likely tokens; 0: all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample among the most likely tokens whose probabilities sum to this, above 0 to 1."""
    updates: PositiveInt = 1
    """Optimizer steps that a batch of rollouts is divided into."""
    epochs: PositiveInt = 1
    """How often each rollout is trained on."""
    rounds: PositiveInt = 1
    """Dynamic sampling: prompts whose completions all have the same reward teach nothing, and are replaced by other
    prompts, up to this many rounds."""
    tool: FunctionPath | None = None
    """A function (text of the turn) -> text or None, called when a turn ends. A text is the tool's answer, which
    the model reads before it continues; None ends the completion."""
    max_turns: PositiveInt = 4
    """With rollout.tool: turns of the model at most."""
    max_batch: PositiveInt = 256
    """Completions that a rank generates at a time, each with a cache of data.seq_len tokens."""


class PolicySection(Section):
    """How rollouts train (train.objective=grpo or rloo). Defaults depend on the objective."""

    clip: float | None = Field(None, gt=0, lt=1)
    """How far the ratio of probabilities may fall below 1 before a token stops to count. Default: 0.2."""
    clip_high: float | None = Field(None, gt=0)
    """How far it may rise above 1. Default: policy.clip."""
    kl: float | None = Field(None, ge=0)
    """Weight of the divergence from the weights of step 0; rloo subtracts it from rewards. Default: 0."""
    scale: Literal["group", "batch", "none"] | None = None
    """grpo: divide advantages by the standard deviation of the rewards of their prompt, or of the batch of rollouts.
    Default: group."""
    average: Literal["tokens", "completions", "max_tokens"] | None = None
    """grpo: mean over all tokens of a step (DAPO), over the tokens of each completion and then over completions, or
    over completions of rollout.max_new_tokens (Dr. GRPO). Default: tokens."""
    ratio: Literal["token", "completion"] | None = None
    """grpo: ratios of tokens, or one of each completion (GSPO). Default: token."""

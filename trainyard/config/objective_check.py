"""What train.objective needs of the other sections of the configuration."""

from typing import Any

from trainyard.config.preference_schema import sample_kind
from trainyard.config.registries import OBJECTIVES, SOURCES
from trainyard.core.section import nearest_multiples
from trainyard.core.user_code import is_user_path
from trainyard.families import family_of

SECTIONS = {"preference": "dpo", "policy": "grpo"}
"""Sections with options of objectives, each with an objective that has them."""
SAMPLES = {"pairs": ("pairs", "preference"), "prompts": ("prompts", "prompts")}
"""What sources have for objectives: the word for it, and the value of data.source."""


def check_objective(config: Any) -> None:
    """Raise ValueError if train.objective does not go with other sections of the Config."""
    train, data, name = config.train, config.data, config.train.objective
    if name and train.loss:
        raise ValueError(f"train.loss={train.loss}: train.objective={name} is the loss; nearest: null")
    if name and not family_of(config.model).is_causal:
        raise ValueError(f"train.objective={name}: {config.model.family} writes no answers; nearest: null")
    if name and config.model.mtp_blocks:
        blocks = f"model.mtp_layers={len(config.model.mtp_blocks)}"
        raise ValueError(f"{blocks}: train.objective={name} predicts no further tokens; nearest: 0")
    if not name and data.has_flag("has_pairs"):
        raise ValueError(f"train.objective: missing; data.source={data.source} has pairs; nearest: dpo")
    if not name and data.has_flag("has_prompts"):
        raise ValueError(f"train.objective: missing; data.source={data.source} has no answers; nearest: grpo")
    objective = OBJECTIVES.find(name) if name and not is_user_path(name) else None
    for section, example in SECTIONS.items():
        given = getattr(config, section).model_dump(exclude_none=True)
        if given and not name:
            raise ValueError(f"{section}: train.objective is not set; nearest: {example}")
        if objective and objective.sections[0] == section:
            objective.check(given)
        elif objective and given:
            raise ValueError(
                f"{section}: train.objective={name} has its options in {objective.sections[0]}; nearest: null"
            )
    if objective and not is_user_path(data.source):
        needed, nearest = SAMPLES[objective.samples]
        if objective.samples not in SOURCES.find(data.source).losses:
            raise ValueError(f"data.source={data.source}: train.objective={name} needs {needed}; nearest: {nearest}")
    if trains_on_rollouts(config):
        check_rollouts(config)
    if config.preference.reference == "live" and config.layout.zero >= 2:
        raise ValueError(
            f"preference.reference=live: no rank has all weights with layout.zero={config.layout.zero}; nearest: stored"
        )
    is_scored = bool(objective and objective.samples == "pairs" and sample_kind(config).scores_ends)
    if config.model.score_head and not (is_scored or is_user_path(name or "")):
        raise ValueError(f"train.objective={name}: model.score_head=true is a reward model; nearest: reward")
    if is_scored and not config.model.score_head:
        raise ValueError(f"model.score_head=false: train.objective={name} trains scores; nearest: true")
    if config.model.score_head and config.samples.every:
        raise ValueError(f"samples.every={config.samples.every}: a reward model writes no text; nearest: 0")


def trains_on_rollouts(config: Any) -> bool:
    """True if the model writes what it trains on. An objective of the user does so on a source of prompts."""
    name = config.train.objective
    if name and not is_user_path(name):
        return bool(OBJECTIVES.find(name).samples == "prompts")
    return bool(name and config.data.has_flag("has_prompts"))


def check_rollouts(config: Any) -> None:
    """Raise ValueError if a run cannot generate the completions that it trains on."""
    train, layout, rollout, name = config.train, config.layout, config.rollout, config.train.objective
    for key, largest in {"pp": 1, "cp": 1, "ep": 1, "zero": 1}.items():
        if getattr(layout, key) > largest:
            raise ValueError(
                f"layout.{key}={getattr(layout, key)}: train.objective={name} generates with the weights of the "
                f"trainer, which a rank must hold whole or split over tp; nearest: {largest}"
            )
    for key, value in {"packing": False, "document_mask": False, "buckets": (), "weights": ()}.items():
        if getattr(config.data, key) != value:
            given = f"data.{key}={getattr(config.data, key)}"
            nearest = [] if value == () else str(value).lower()
            raise ValueError(f"{given}: train.objective={name} makes its samples itself; nearest: {nearest}")
    if not rollout.rewards and config.data.source != "synthetic":
        raise ValueError(f"rollout.rewards: missing; train.objective={name} needs one; nearest: my_module:my_reward")
    if twice := next((each for each in rollout.rewards if rollout.rewards.count(each) > 1), None):
        raise ValueError(f"rollout.rewards={twice}: given twice; nearest: once, with rollout.weights")
    if rollout.weights and len(rollout.weights) != len(rollout.rewards):
        raise ValueError(
            f"rollout.weights={list(rollout.weights)}: {len(rollout.rewards)} rollout.rewards; give one per reward"
        )
    if train.global_batch % rollout.completions:
        raise ValueError(
            f"train.global_batch={train.global_batch}: not a multiple of rollout.completions={rollout.completions}; "
            f"nearest: {nearest_multiples(train.global_batch, rollout.completions)}"
        )
    if rollout.max_new_tokens >= config.data.seq_len:
        raise ValueError(
            f"rollout.max_new_tokens={rollout.max_new_tokens}: leaves no room for a prompt in "
            f"data.seq_len={config.data.seq_len}; nearest: {max(config.data.seq_len // 2, 1)}"
        )

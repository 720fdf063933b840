"""Reward functions of the user: what they get, and checks of what they return."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.user_code import call_function, describe_object, import_function


class RewardFunctions:
    """The functions of rollout.rewards. Each gets what TRL gives those of its trainers: `prompts`, `completions`,
    `completion_ids`, and each key of the records as a list."""

    def __init__(self, paths: Sequence[str], weights: Sequence[float]) -> None:
        self.paths, self.weights = paths, weights or [1.0] * len(paths)
        self.functions: list[Callable[..., Any]] = [import_function(path, "rollout.rewards") for path in paths]

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        records: Sequence[Mapping[str, Any]],
    ) -> list[list[float]]:
        """The rewards of each completion, one of each function; NaN where it does not apply."""
        keys = dict.fromkeys(key for record in records for key in record)
        columns = {key: [record.get(key) for record in records] for key in keys if key not in RESERVED}
        arguments = {"prompts": [*prompts], "completions": [*completions], "completion_ids": [*completion_ids]}
        by_function = [
            _check(call_function(function, path, **arguments, **columns), path, len(completions))
            for function, path in zip(self.functions, self.paths, strict=True)
        ]
        return [list(rewards) for rewards in zip(*by_function, strict=True)]

    def total(self, rewards: Sequence[float]) -> float:
        """The weighted sum of those that apply; NaN if none does."""
        known = [w * r for w, r in zip(self.weights, rewards, strict=True) if not math.isnan(r)]
        return sum(known) if known else math.nan


def exact(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """1 for the answer of the record, 0 for anything else. Does not apply to records without an answer."""
    pairs = zip(completions, answer, strict=True)
    return [None if right is None else float(_last_text(each).strip() == str(right).strip()) for each, right in pairs]


def matching(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """The share of the answer's characters that the completion has at their place."""
    texts = [None if right is None else str(right) for right in answer]
    return [
        None if right is None else sum(map(str.__eq__, _last_text(each), right)) / max(len(right), 1)
        for each, right in zip(completions, texts, strict=True)
    ]


def _last_text(completion: Any) -> str:
    """A completion that is text, or the last turn of one that is messages."""
    text: str = completion if isinstance(completion, str) else completion[-1]["content"]
    return text


RESERVED = ("prompt", "prompts", "completion", "completions", "completion_ids")
"""Keys of records that are given under another name, or not at all."""


def _check(result: Any, path: str, count: int) -> list[float]:
    """What a function returned, as numbers. Raises UserError if it is something else."""
    if not hasattr(result, "__len__") or isinstance(result, str | Mapping):
        raise UserError(f"{path}: returned {describe_object(result)}; a reward is a list of numbers")
    if len(result) != count:
        raise UserError(f"{path}: returned {counted(len(result), 'number')} for {counted(count, 'completion')}")
    return [math.nan if value is None else _number(value, path) for value in result]


def _number(value: Any, path: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UserError(f"{path}: returned {describe_object(value)}; a reward is a number or None") from None
    if not math.isfinite(number):
        raise UserError(f"{path}: returned {number}; a reward is finite, or None where it does not apply")
    return number

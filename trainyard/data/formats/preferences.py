"""Records of preference data sets, as text or messages: a prompt with a chosen and a rejected answer, or with an answer
that is good or not."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

from trainyard.core.errors import UserError
from trainyard.core.user_code import describe_object
from trainyard.data.formats.conversations import SHAREGPT_ROLES, Conversation, read_conversation


class Preference(NamedTuple):
    chosen: Conversation
    """The prompt and the better answer, which alone is trained."""
    rejected: Conversation
    margin: float = 0.0
    """By how much the record wants the reward of the chosen answer to be larger."""


class LabeledAnswer(NamedTuple):
    answer: Conversation
    """The prompt and an answer, which alone is trained."""
    is_good: bool


def read_preference(record: Mapping[str, Any]) -> Preference | LabeledAnswer:
    """The pair of a record, or its answer with a label. Raises UserError with the reason if it has none."""
    prompt = record.get("prompt")
    if record.get("completion") is not None and not any(key in record for key in KEYS):
        return LabeledAnswer(_answers(record, prompt, ("completion",))[0], _label(record.get("label")))
    if missing := [key for key in KEYS if record.get(key) is None]:
        found = ", ".join(map(str, record))
        raise UserError(
            "no pair of answers: expected chosen and rejected, or completion and label; "
            f"found {found} (no {missing[0]})"
        )
    chosen, rejected = _answers(record, prompt, KEYS)
    return Preference(chosen, rejected, _margin(record.get("margin")))


def _answers(record: Mapping[str, Any], prompt: Any, keys: tuple[str, ...]) -> list[Conversation]:
    """The answers that these keys have, each with the prompt."""
    if all(isinstance(record[key], str) for key in keys) and isinstance(prompt, str | None):
        return [Conversation([], prompt=prompt or "", completion=record[key]) for key in keys]
    before = _messages(record.get("conversations") or prompt, "user")
    answers = [_messages(record[key], "assistant") for key in keys]
    common = _common(*answers) if len(answers) == 2 and answers[0] and answers[0][0].get("role") != "assistant" else 0
    if common:  # whole conversations: the prompt is what they share
        before, answers = answers[0][:common], [answer[common:] for answer in answers]
    if not before:
        raise UserError("no prompt: expected prompt, or conversations that begin alike in chosen and rejected")
    return [_conversation(before, answer, record) for answer in answers]


KEYS = ("chosen", "rejected")


def _label(value: Any) -> bool:
    if value is None:
        raise UserError("completion without label: expected label, true or false, or chosen and rejected")
    if value not in (True, False):
        raise UserError(f"label is {describe_object(value)}; expected true or false")
    return bool(value)


def _margin(value: Any) -> float:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value)):
        raise UserError(f"margin is {describe_object(value)}; expected a number")
    return float(value or 0.0)


def _messages(value: Any, role: str) -> list[dict[str, Any]]:
    """Messages, from ShareGPT's turns too; a text is one of `role`."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    turns = [value] if isinstance(value, Mapping) else value
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise UserError(f"an answer or prompt is {describe_object(value)}; expected text or messages")
    return [
        {"role": SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}
        if "from" in turn
        else {**turn}
        for turn in turns
    ]


def _common(chosen: list[dict[str, Any]], rejected: list[dict[str, Any]]) -> int:
    """The number of messages that both begin with, without the last one of either, which is an answer."""
    most = min(len(chosen), len(rejected)) - 1
    return next((at for at in range(most) if chosen[at] != rejected[at]), max(most, 0))


def _conversation(
    prompt: list[dict[str, Any]], answer: list[dict[str, Any]], record: Mapping[str, Any]
) -> Conversation:
    if not any(turn.get("role") == "assistant" for turn in answer):
        roles = ", ".join(str(turn.get("role")) for turn in answer) or "no message"
        raise UserError(f"an answer is not the assistant's: found {roles}; expected role assistant")
    whole = read_conversation({"messages": prompt + answer, "tools": record.get("tools")}, "messages")
    return whole._replace(trained=(False,) * len(prompt) + whole.trained[len(prompt) :])

"""Records of fine-tuning data sets as conversations: messages, ShareGPT, Alpaca, prompts with completions, and the
inputs with outputs of NxD Training."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainyard.core.errors import UserError
from trainyard.core.user_code import describe_object, nearest_name
from trainyard.data.formats.documents import read_records, record_slices

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("function_response", "observation", "function"), "tool"),
}
"""Values of `from`, and what they mean."""
TURN_KEYS = ("train", "weight")
"""Keys of a message that say whether it is trained: true or false, 1 or 0."""


class Conversation(NamedTuple):
    messages: list[dict[str, Any]]
    """Empty for text without a template."""
    tools: list[Any] | None = None
    trained: tuple[bool | None, ...] = ()
    """For each message whether it is trained; None: its role decides."""
    prompt: str = ""
    """Text without a template."""
    completion: str = ""
    """What follows the prompt, and is trained."""


def read_conversation(record: Mapping[str, Any], format: str = "auto") -> Conversation:
    """The conversation of a record. Raises UserError with the reason if it has none."""
    if format == "auto":
        format = detect_format(record)
    return FORMATS[format](record)


def detect_format(record: Mapping[str, Any]) -> str:
    for name, keys in FORMAT_KEYS.items():
        if all(record.get(key) is not None for key in keys):
            return name
    expected = ", ".join(" and ".join(keys) for keys in FORMAT_KEYS.values())
    near = next((hint for key in record if (hint := nearest_name(str(key), _all_keys()))), "")
    raise UserError(f"no conversation: expected the keys {expected}; found {', '.join(map(str, record))}{near}")


def is_conversation_file(path: Path) -> bool:
    """True if the first record of a file is one of these formats."""
    try:
        record = next((record for each in record_slices([path]) for _, record in read_records(each)), "")
        return isinstance(record, dict) and bool(detect_format(record))
    except UserError:
        return False


def _all_keys() -> list[str]:
    return [key for keys in FORMAT_KEYS.values() for key in keys]


def _messages(record: Mapping[str, Any]) -> Conversation:
    return _conversation(_list(record, "messages"), record)


def _sharegpt(record: Mapping[str, Any]) -> Conversation:
    messages: list[Any] = []
    if isinstance(system := record.get("system"), str) and system:
        messages.append({"role": "system", "content": system})
    for turn in _list(record, "conversations"):
        if not isinstance(turn, Mapping):
            raise UserError(f"a turn is {describe_object(turn)}; expected from and value")
        if "role" in turn:  # messages under another key
            messages.append(turn)
            continue
        name = turn.get("from")
        if name not in SHAREGPT_ROLES:
            hint = nearest_name(str(name), SHAREGPT_ROLES)
            raise UserError(f"a turn is from {name!r}; expected {', '.join(SHAREGPT_ROLES)}{hint}")
        rest = {key: turn[key] for key in turn if key not in ("from", "value")}
        call = _json(turn.get("value")) if name == "function_call" else None
        if isinstance(call, dict | list):
            calls = [{"type": "function", "function": each} for each in (call if isinstance(call, list) else [call])]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls, **rest})
        else:
            messages.append({"role": SHAREGPT_ROLES[name], "content": turn.get("value"), **rest})
    return _conversation(messages, record)


def _alpaca(record: Mapping[str, Any]) -> Conversation:
    instruction, given = _text(record, "instruction"), record.get("input") or ""
    system, history = record.get("system") or "", record.get("history") or []
    try:
        turns = [[user, answer] for user, answer in history]
    except (TypeError, ValueError):
        raise UserError("history: expected pairs of an instruction and an answer") from None
    turns.append([f"{instruction}\n\n{given}" if given else instruction, _text(record, "output")])
    messages = [{"role": "system", "content": system}] if system else []
    for user, answer in turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return _conversation(messages, record)


def _prompt_completion(record: Mapping[str, Any]) -> Conversation:
    if isinstance(record["prompt"], str):
        return Conversation([], prompt=record["prompt"], completion=_text(record, "completion"))
    prompt = _conversation(_list(record, "prompt"), record)
    completion = _conversation(_list(record, "completion"), {})
    untrained = tuple(False if each is None else each for each in prompt.trained)
    return Conversation(prompt.messages + completion.messages, prompt.tools, untrained + completion.trained)


def _input_output(record: Mapping[str, Any]) -> Conversation:
    return Conversation([], prompt=_text(record, "input"), completion=_text(record, "output"))


FORMAT_KEYS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "input_output": ("input", "output"),
}
"""Keys by which a record is recognized, in this order."""
FORMATS: dict[str, Callable[[Mapping[str, Any]], Conversation]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "input_output": _input_output,
}


def _conversation(messages: Sequence[Any], record: Mapping[str, Any]) -> Conversation:
    if not messages:
        raise UserError("no messages")
    tools = _json(record.get("tools"))
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"tools: {describe_object(tools)}; expected a list of functions")
    checked = [_message(message) for message in messages]
    return Conversation([message for message, _ in checked], tools or None, tuple(trained for _, trained in checked))


def _message(message: Any) -> tuple[dict[str, Any], bool | None]:
    """The message as templates expect it, and whether its record says that it is trained."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError(f"a message is {describe_object(message)} without role; expected role and content")
    plain, trained = {**message}, None
    for key in TURN_KEYS:
        value = plain.pop(key, None)
        if value is not None and value not in (0, 1):
            raise UserError(
                f"a message has {key}={value!r}; expected {'0 or 1' if key == 'weight' else 'true or false'}"
            )
        trained = trained if value is None else bool(value)
    content = plain.setdefault("content", "")
    if content is not None and not isinstance(content, str | list):
        raise UserError(f"the content of a message is {describe_object(content)}; expected text")
    if plain.get("tool_calls"):
        plain["tool_calls"] = list(map(_tool_call, plain["tool_calls"]))
    return plain, trained


def _tool_call(call: Any) -> Any:
    """Arguments as an object: templates write them as JSON themselves, but OpenAI's API has them as text."""
    if isinstance(call, Mapping) and isinstance(function := call.get("function"), Mapping):
        return {**call, "function": {**function, "arguments": _json(function.get("arguments"))}}
    return call


def _json(value: Any) -> Any:
    """What a text holds as JSON; the value itself if it is no text, or none that JSON can read."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _list(record: Mapping[str, Any], key: str) -> list[Any]:
    value = _json(record.get(key))
    if not isinstance(value, list):
        raise UserError(f"{key}: {describe_object(value)}; expected a list of messages")
    return value


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise UserError(f"{key}: {describe_object(value)}; expected text")
    return value

"""Calls of functions in what a model writes.

Models write them in the formats that their chat templates show. Three are known: `<tool_call>` elements (Hermes, Qwen),
`[TOOL_CALLS]` with a list (Mistral), and a JSON object that is all of the text (Llama 3, and texts that a schema
forces).
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

ELEMENT = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
LIST_MARK = "[TOOL_CALLS]"
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolCall(NamedTuple):
    name: str
    arguments: str
    """A JSON object."""


def parse_tool_calls(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls of functions in `names`. A text with anything else is only text."""
    before, mark, after = text.partition(LIST_MARK)
    if elements := ELEMENT.findall(text):
        content, found = ELEMENT.sub("", text).strip(), elements
    elif mark:
        content, found = before.strip(), [after]
    else:
        content, found = "", [text]
    try:
        values = [json.loads(each) for each in found]
        entries = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
        calls = [_read_call(entry) for entry in entries]
    except (ValueError, RecursionError):
        return text, []
    return (content, calls) if calls and all(call.name in names for call in calls) else (text, [])


def _read_call(entry: Any) -> ToolCall:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ValueError("not a call")
    arguments = entry.get("arguments", entry.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are not an object")
    return ToolCall(entry["name"], json.dumps(arguments, ensure_ascii=False))


def call_schema(functions: Sequence[Mapping[str, Any]]) -> str:
    """The JSON schema of a call of one of some functions, for a model that must call one."""
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for function in functions:
        name = function["name"]
        # References inside of the parameters are relative to their own root.
        parameters = json.dumps(function.get("parameters") or NO_ARGUMENTS)
        definitions[name] = json.loads(parameters.replace('"$ref": "#', f'"$ref": "#/$defs/{name}'))
        properties = {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}}
        calls.append({"type": "object", "properties": properties, "required": ["name", "arguments"]})
        calls[-1]["additionalProperties"] = False
    return json.dumps({"anyOf": calls, "$defs": definitions})

"""Calls of functions in the formats that vLLM's parsers know, and texts that are none."""

import json

import jsonschema_rs
import pytest

from trainyard.inference.text.tool_calls import call_schema, parse_tool_calls

NAMES = {"add", "now"}
ADD = ("add", {"a": 1, "b": [2, "é"]})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}\n</tool_call>', "", [ADD]),
        (
            'Sure.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2, "\\u00e9"]}}</tool_call>',
            "Sure.",
            [("now", {}), ADD],
        ),
        ('{"name": "add", "parameters": {"a": 1, "b": [2, "é"]}}', "", [ADD]),
        (' {"name": "now", "arguments": "{}"}\n', "", [("now", {})]),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}, {"name": "now", "arguments": {}}]', "",
         [ADD, ("now", {})]),
        *((text, text, []) for text in [
            "", "hello", "{", '{"name": "other", "arguments": {}}', '{"name": "add"}', '{"name": 1, "arguments": {}}',
            '{"name": "add", "arguments": [1]}', "<tool_call>{</tool_call>", "<tool_call>", "[TOOL_CALLS]", "[]", "[1]",
            '{"a": 1}', "null", '<tool_call>{"name": "add", "arguments": {"a": 1}}', "[" * 100_000,
        ]),
    ],
)  # fmt: skip
def test_calls_are_found(text: str, content: str, calls: list[tuple[str, object]]) -> None:
    found_content, found = parse_tool_calls(text, NAMES)
    assert found_content == content
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls


def test_schema_of_a_call() -> None:
    """References inside of the parameters of a function keep their meaning."""
    tree = {
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/node"}, "again": {"$ref": "#"}},
        "$defs": {"node": {"type": "integer"}},
        "additionalProperties": False,
    }
    text = {"type": "object", "properties": {"x": {"$ref": "#/$defs/node"}}, "$defs": {"node": {"type": "string"}}}
    schema = json.loads(
        call_schema([{"name": "t", "parameters": tree}, {"name": "s", "parameters": text}, {"name": "n"}])
    )
    validator = jsonschema_rs.validator_for(schema)
    for name, arguments, is_valid in [
        ("t", {"left": 1}, True),
        ("t", {"again": {"left": 1}}, True),
        ("t", {"left": "x"}, False),
        ("t", {"again": {"left": "x"}}, False),
        ("s", {"x": "x"}, True),
        ("s", {"x": 1}, False),
        ("n", {}, True),
        ("n", {"x": 1}, False),
        ("other", {}, False),
    ]:
        assert validator.is_valid({"name": name, "arguments": arguments}) == is_valid, (name, arguments)

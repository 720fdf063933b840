"""Validation errors of pydantic as one line each: the key, the value found, the nearest valid value."""

import difflib
import re
from collections.abc import Iterable
from math import isfinite
from typing import get_args

from pydantic_core import ErrorDetails

from trainyard.config.renamed_keys import NEW_VALUES, RENAMED_KEYS, RENAMED_VALUES
from trainyard.config.schema import Config
from trainyard.config.schema_docs import allowed_values, field_docstrings, schema_keys, tagged_unions, without_tags
from trainyard.config.yaml_io import format_value
from trainyard.core.section import Section
from trainyard.families import find_family

EXPECTED_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "dict": "a mapping",
    "model": "a mapping",
}
"""Expected type by the first word of pydantic's error type."""
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
KEYS_COMMAND = "see trainyard config --keys"


def first_error_line(mistakes: Iterable[ErrorDetails]) -> str:
    """Describe the first mistake. Unknown keys come first: a misspelled key often leaves another one missing."""
    return _error_line(min(mistakes, key=lambda details: details["type"] != "extra_forbidden"))


def is_rule_of_section(mistake: ErrorDetails) -> bool:
    """True if each value is valid, but not together with others of its section, or with other sections."""
    return mistake["type"] == "value_error" and isinstance(mistake["input"], dict)


def _error_line(error: ErrorDetails) -> str:
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    key, section = _locate(error["loc"])
    assignment = f"{key}={format_value(value)}"
    tag_key = f"{key}.family" if key == "model" else f"{key}.kind"
    if kind == "extra_forbidden":
        return f"{assignment}: {_unknown_key_hint(key, section, value)}"
    if kind == "missing":
        return f"{key}: missing, and it has no default; needed: {_describe(section, key)}"
    if kind == "union_tag_not_found":
        return f"{tag_key}: missing; one of {', '.join(tagged_unions()[key])}"
    if kind == "union_tag_invalid":
        tag, tags = str(context["tag"]), list(tagged_unions()[key])
        return f"{tag_key}={tag}: not one of {', '.join(tags)}; nearest: {_closest(tag, tags)}"
    if kind == "family_error":
        return f"{tag_key}={context['name']}: {context['reason']}"
    if kind == "literal_error":
        if isinstance(value, str) and value in RENAMED_VALUES.get(key, {}):
            return f"{assignment}: renamed to {RENAMED_VALUES[key][value]}"
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        return f"{assignment}: not one of {', '.join(choices)}; nearest: {_closest(str(value), choices)}"
    if kind == "value_error":
        message = str(context["error"])
        if message.split("=")[0].isidentifier():  # the check of a section names its key without the section
            return f"{key}.{message}" if key else message
        return message if not key else f"{assignment}: {message}"
    for bound, words in BOUNDS.items():
        if bound in context:
            limit = context[bound]
            return f"{assignment}: must be {words} {limit}; nearest: {_value_within(section, key, bound, limit)}"
    if kind == "string_pattern_mismatch":
        example = "my_module:my_function" if ":" in str(context["pattern"]) else "my-run.1"
        return f"{assignment}: wrong form; nearest: {example}"
    if kind == "tuple_type" and isinstance(value, str | int | float):
        return f"{assignment}: not a list; nearest: [{format_value(value)}]"
    expected = EXPECTED_TYPES.get(kind.split("_")[0], error["msg"])
    nearest = _nearest_value(section, key, value)
    return f"{assignment}: not {expected}; " + (f"nearest: {nearest}" if nearest else _needed(section, key))


def _locate(loc: tuple[int | str, ...]) -> tuple[str, type[Section] | None]:
    """Return the dotted key without tags of unions, and the section that contains its last part."""
    names: list[str] = []
    section: type[Section] | None = Config
    for item in loc:
        if names == ["model"] and section in (Config, None):
            section = find_family(str(item)).config_class
            continue
        classes = tagged_unions().get(".".join(names), {})
        if item in classes:
            section = classes[str(item)]
            continue
        names.append(str(item))
        field = section.model_fields.get(str(item)) if section else None
        inner = field.annotation if field else None
        if isinstance(inner, type) and issubclass(inner, Section) and item != loc[-1]:
            section = inner
    return ".".join(names), section


TAG = re.compile(r"\[(\w+)\]")
"""The family of a model, or the kind of another section, in the name of a documented key."""


def _unknown_key_hint(key: str, section: type[Section] | None, value: object) -> str:
    prefix, _, leaf = key.rpartition(".")
    siblings = list(section.model_fields) if section else []
    renamed = RENAMED_KEYS.get(key, "")
    if renamed.rsplit(".", 1)[-1] in siblings:
        values = NEW_VALUES.get(key, {}) if isinstance(value, bool) else {}
        return f"renamed to {renamed}" + "".join(f"={format_value(new)}" for old, new in values.items() if old is value)
    tags = [TAG.findall(doc.name) for doc in schema_keys() if without_tags(doc.name) == key]
    if owners := [tag[-1] for tag in tags if tag]:
        return f"unknown key here; {' and '.join(owners)} {'has' if len(owners) == 1 else 'have'} it"
    close = difflib.get_close_matches(leaf, siblings, 1, 0.6)
    if close:
        nearest = f"{prefix}.{close[0]}" if prefix else close[0]
    else:
        others = [name for doc in schema_keys() if not (name := without_tags(doc.name)).startswith(f"{prefix}.")]
        every_key = [*others, *(f"{prefix}.{sibling}" for sibling in siblings)]
        same_leaf = [dotted for dotted in every_key if dotted.split(".")[-1] == leaf]
        nearest = (same_leaf or [_closest(key, every_key)])[0]
    return f"unknown key; nearest: {nearest}"


def _describe(section: type[Section] | None, key: str) -> str:
    name = key.split(".")[-1]
    if section is None or name not in section.model_fields:
        return KEYS_COMMAND
    if text := field_docstrings(section).get(name):
        return text
    field = section.model_fields[name]
    doc = getattr(field.annotation, "__doc__", None) if isinstance(field.annotation, type) else None
    return f"the section. {doc}" if doc else "the section"


def _needed(section: type[Section] | None, key: str) -> str:
    """Say what a key without a default takes, such as `needed: whole number, >= 1 (Optimizer steps)`."""
    field = section.model_fields.get(key.split(".")[-1]) if section else None
    allowed = allowed_values(field) if field else ""
    description = _describe(section, key).rstrip(".")
    return f"needed: {allowed} ({description})" if allowed else f"needed: {description}"


def _nearest_value(section: type[Section] | None, key: str, value: object) -> str | None:
    """Return a valid value: the same number in the right type, else the default; None if there is neither."""
    field = section.model_fields.get(key.split(".")[-1]) if section else None
    if field is None:
        return KEYS_COMMAND
    types = get_args(field.annotation) or (field.annotation,)
    number_type = next((kind for kind in types if kind in (int, float)), None)
    if number_type and isinstance(value, str | float) and not isinstance(value, bool):
        try:
            if isfinite(number := float(value)):
                return format_value(number_type(number))
        except (ValueError, OverflowError):
            pass
    return None if field.is_required() else format_value(field.get_default(call_default_factory=True))


def _value_within(section: type[Section] | None, key: str, bound: str, limit: float) -> str:
    if bound in ("ge", "le"):
        return format_value(limit)
    default = _nearest_value(section, key, None)
    return f"{default} (the default)" if (default or "")[:1].isdigit() else f"any number {BOUNDS[bound]} {limit}"


def _closest(name: str, choices: list[str]) -> str:
    return (difflib.get_close_matches(name, choices, 1, 0.0) or choices)[0]

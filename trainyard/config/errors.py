"""Errors about keys in one line: the key, the value found, the nearest valid value.

Most come from pydantic. For an unknown key, the line names the key that the user probably means: a misspelled one, one
of another section, or one of another system. A wrong suggestion is worse than none, so nothing is suggested below a
similarity.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from math import isfinite
from typing import NamedTuple, get_args

from pydantic_core import ErrorDetails

from trainyard.config.foreign_keys import AXOLOTL, COMMON, HF_TRAINER, OLMO_CORE, TORCHTITAN, TRL
from trainyard.config.schema import Config
from trainyard.config.schema_docs import allowed_values, field_docstrings, schema_keys, tagged_unions, without_tags
from trainyard.core.section import Section
from trainyard.core.user_code import nearest_name
from trainyard.core.yaml_io import format_value
from trainyard.families import all_families, find_family
from trainyard.families.linear_wrapper import LINEAR_WRAPPERS, LinearSection

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
SIMILAR_KEY = 0.6
"""Similarity of names of one section."""
SIMILAR_NAME = 0.8
"""Similarity to any other name."""
MAX_SAME_NAME = 4
"""A name that more sections have says too little."""


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
        return _unknown_key_line(key, section, value)
    if kind == "missing":
        return f"{key}: missing, and it has no default; needed: {_describe(section, key)}"
    if kind == "union_tag_not_found":
        return f"{tag_key}: missing; one of {', '.join(tagged_unions()[key])}"
    if kind == "union_tag_invalid":
        tag, tags = str(context["tag"]), list(tagged_unions()[key])
        return f"{tag_key}={tag}: not one of {', '.join(tags)}{nearest_name(tag, tags)}"
    if kind == "family_error":
        return f"{tag_key}={context['name']}: {context['reason']}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        return f"{assignment}: not one of {', '.join(choices)}{nearest_name(str(value), choices)}"
    if is_rule_of_section(error):  # the message names a key, without its section
        return f"{key}.{context['error']}" if key else str(context["error"])
    if kind == "value_error":
        return f"{assignment}: {context['error']}"
    for bound, words in BOUNDS.items():
        if bound in context:
            limit = context[bound]
            return f"{assignment}: must be {words} {limit}; nearest: {_value_within(section, key, bound, limit)}"
    if kind == "string_pattern_mismatch":
        example = "my_module:my_function" if ":" in str(context["pattern"]) else "my-run.1"
        return f"{assignment}: wrong form; nearest: {example}"
    if kind == "tuple_type" and isinstance(value, str | int | float):
        return f"{assignment}: not a list; nearest: [{format_value(value)}]"
    if (inner := _section_at(section, key)) and inner.model_fields:
        return f"{assignment}: {key} is a section; set one of its keys, such as {key}.{next(iter(inner.model_fields))}"
    expected = EXPECTED_TYPES.get(kind.split("_")[0], error["msg"])
    nearest = _nearest_value(section, key, value)
    return f"{assignment}: not {expected}; " + (f"nearest: {nearest}" if nearest else _needed(section, key))


def _locate(loc: tuple[int | str, ...]) -> tuple[str, type[Section] | None]:
    """Return the dotted key without tags of unions, and the section that contains its last part."""
    names: list[str] = []
    section: type[Section] | None = Config
    for item in loc:
        if names == ["model"] and (section in (Config, None) or ":" in str(item)):  # the tag of a family
            section = find_family(str(item)).config_class
            continue
        classes = tagged_unions().get(".".join(names), {})
        if item in classes:
            section = classes[str(item)]
            continue
        names.append(str(item))
        inner = _section_at(section, str(item))
        if inner and item != loc[-1]:
            section = inner
    if names[:2] == ["model", "linear"] and set(names[2:3]) & set(LINEAR_WRAPPERS.built_in):
        names = names[2:]  # a section of its own in a file
    return ".".join(names), section


def _section_at(section: type[Section] | None, key: str) -> type[Section] | None:
    """The class of the section `key`, whose last part is a field of `section`; None if that is a key with a value."""
    name = key.rpartition(".")[2]
    if section is LinearSection:
        return section.keys_of(name)
    field = section.model_fields.get(name) if section else None
    inner = field.annotation if field else None
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


TAG = re.compile(r"\[(\w+)\]")
"""The family of a model, or the kind of another section, in the name of a documented key."""


def _unknown_key_line(key: str, section: type[Section] | None, value: object) -> str:
    while isinstance(value, dict) and value:  # an unknown section: its first key says more
        name, value = next(iter(value.items()))
        key, section = f"{key}.{name}", None
    return f"{key}={format_value(value)}: {_unknown_key_hint(key, section)}"


def _unknown_key_hint(key: str, section: type[Section] | None) -> str:
    tags = [TAG.findall(doc.name) for doc in schema_keys() if without_tags(doc.name) == key]
    if owners := [tag[-1] for tag in tags if tag]:
        *others, last = owners
        return "unknown key here; " + (f"{', '.join(others)} and {last} have it" if others else f"{last} has it")
    return f"unknown key; {suggest_key(key, section.model_fields if section else ())}"


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


class ForeignKey(NamedTuple):
    """The keys here that do what a name of another system does."""

    keys: tuple[str, ...]
    """Keys, perhaps with a value, or commands; may be empty."""
    note: str

    def describe(self, value: str) -> str:
        if not self.keys:
            return self.note
        takes_value = len(self.keys) == 1 and not {"=", " "} & set(self.keys[0])
        keys = f"{self.keys[0]}={value}" if takes_value and value and not self.note else " and ".join(self.keys)
        return f"nearest: {keys}" + (f" ({self.note})" if self.note else "")


def suggest_key(name: str, siblings: Collection[str] = (), value: str = "") -> str:
    """The end of an error message about the unknown key `name`, such as `nearest: optimizer.lr`. `siblings` are the
    keys of its section, if the section exists; `value` is added to the key."""
    section, _, leaf = name.rpartition(".")
    own_keys = [f"{section}.{sibling}" for sibling in siblings] if section else list(siblings)
    every_key = _own_keys()
    assigned = f"={value}" if value else ""
    if name in every_key:
        return f"nearest: {name}{assigned}"
    by_leaf = _by_last_part().get(_normalized(leaf))
    if foreign := _foreign_keys().get(_normalized(name)):
        return foreign.describe(value)
    if by_leaf and set(by_leaf.keys) & set(own_keys):
        return by_leaf.describe(value)
    if close := difflib.get_close_matches(leaf.lower(), siblings, 1, SIMILAR_KEY):
        return f"nearest: {section}{'.' if section else ''}{close[0]}{assigned}"
    if by_leaf:
        return by_leaf.describe(value)
    same_name = sorted(key for key in every_key if key.rpartition(".")[2] == leaf.lower())
    if 0 < len(same_name) <= MAX_SAME_NAME:
        return f"nearest: {' or '.join(key + assigned for key in same_name)}"
    if close := difflib.get_close_matches(name.lower(), every_key, 1, SIMILAR_NAME):
        return f"nearest: {close[0]}{assigned}"
    if close := difflib.get_close_matches(_normalized(leaf), _by_last_part(), 1, SIMILAR_NAME):
        return _by_last_part()[close[0]].describe(value)
    return KEYS_COMMAND


def _normalized(name: str) -> str:
    return name.replace("-", "_").lower()


@cache
def _own_keys() -> frozenset[str]:
    return frozenset(without_tags(doc.name) for doc in schema_keys())


@cache
def _foreign_keys() -> dict[str, ForeignKey]:
    found: dict[str, ForeignKey] = {}
    for name, key in (*_rows_of_tables(), *_rules_of_importers(), *_names_of_families()):
        found.setdefault(_normalized(name), key)
    return found


@cache
def _by_last_part() -> dict[str, ForeignKey]:
    """The same by the last part of a dotted name, as far as that has one meaning, and none here."""
    common = {name for names in COMMON for name in names.split()}
    own = {key.rpartition(".")[2] for key in _own_keys()}
    found: dict[str, ForeignKey] = {}
    ambiguous: set[str] = set()
    for name, key in _foreign_keys().items():
        leaf = name.rpartition(".")[2]
        if leaf in own and leaf != name:
            continue
        if found.setdefault(leaf, key).keys != key.keys and leaf not in common:
            ambiguous.add(leaf)
    return {leaf: key for leaf, key in found.items() if leaf not in ambiguous}


def _rows_of_tables() -> Iterator[tuple[str, ForeignKey]]:
    for rows in (COMMON, *HF_TRAINER.values(), *TORCHTITAN.values(), OLMO_CORE, *TRL.values(), *AXOLOTL.values()):
        for names, (keys, note) in rows.items():
            for name in names.split():
                yield name, ForeignKey(tuple(filter(None, keys.split(", "))), note)


def _rules_of_importers() -> Iterator[tuple[str, ForeignKey]]:
    # These tables are large, and few configurations have an unknown key.
    from trainyard.importers.megatron.keys import MEGATRON_FLAGS
    from trainyard.importers.nxdt.keys import NXDT_KEYS

    for name, rule in (*NXDT_KEYS.items(), *MEGATRON_FLAGS.items()):
        if rule.action in ("copied", "maps"):
            yield name, ForeignKey(tuple(rule.target.split(", ")), "")
        else:  # the rest of a reason names keys of the other system
            yield name, ForeignKey((), rule.target.partition("; nearest")[0])


def _names_of_families() -> Iterator[tuple[str, ForeignKey]]:
    for family in all_families().values():
        for key, (hf_key, _) in family.hf.keys.items():
            if key != hf_key:
                yield hf_key, ForeignKey((f"model.{key}",), "")

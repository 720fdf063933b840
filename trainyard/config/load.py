"""From YAML and `key=value` words to a Config, or to one line that says what is wrong and what would work."""

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from trainyard.config.base import Section
from trainyard.config.hf_config import from_hf
from trainyard.config.importers.key_table import ImportedConfig, format_value
from trainyard.config.importers.nxdt.convert import import_nxdt, is_nxdt
from trainyard.config.model_schema import BertConfig, GptConfig, LinearRopeScaling, Llama3RopeScaling, LlamaConfig
from trainyard.config.recipes import find_config
from trainyard.config.schema import Config
from trainyard.config.yaml_io import ConfigYamlLoader, read_yaml
from trainyard.core.errors import UserError

MODEL_FAMILIES: dict[str, type[Section]] = {"llama": LlamaConfig, "gpt": GptConfig, "bert": BertConfig}
TAGGED_UNIONS: dict[str, dict[str, type[Section]]] = {
    "model": MODEL_FAMILIES,
    "model.rope_scaling": {"linear": LinearRopeScaling, "llama3": Llama3RopeScaling},
}
TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "dict": "a mapping",
    "model": "a mapping",
}


PYTHON_TYPE_NAMES: dict[Any, str] = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    dict: "mapping",
}


def load(source: str | Path, overrides: Iterable[str] = (), say: Callable[[str], None] | None = None) -> Config:
    """Read a file or a recipe by name, apply `key=value` words, check everything.

    A file of NxD Training is mapped on the way; `say` (default: a line to standard error) hears what that changes.
    """
    path = find_config(source)
    data = read_yaml(path)
    if not is_nxdt(data):
        return parse(data, overrides, where=str(source))
    mapped = import_nxdt(data, str(source), path.parent)
    for line in (f"{source}: NxD Training's; what its keys become: trainyard import {source}", *mapped.warnings):
        (say or partial(print, file=sys.stderr))(f"note: {line}")
    return validate_imported(mapped, overrides, str(source))


def validate_imported(imported: ImportedConfig, overrides: Iterable[str] = (), where: str = "") -> Config:
    """What was mapped from a foreign configuration, checked; what is missing is said with where it would come from."""
    try:
        return parse(imported.data, overrides, where)
    except UserError as error:
        hint = f" ({imported.missing_hint})" if imported.missing_hint and ": missing" in str(error) else ""
        raise UserError(f"{error}{hint}") from None


def parse(data: dict[str, Any], overrides: Iterable[str] = (), where: str = "") -> Config:
    """A Config from plain data; the first mistake is raised as one line."""
    for word in overrides:
        _override(data, word)
    model = data.get("model")
    if isinstance(model, dict) and "from_hf" in model:
        rest = {key: value for key, value in model.items() if key != "from_hf"}
        data = {**data, "model": {**from_hf(str(model["from_hf"])).model_dump(mode="json"), **rest}}
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        prefix = f"{where}: " if where else ""
        # A misspelt key often leaves another one missing: it is the one to name.
        found = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        raise UserError(prefix + _line(found[0])) from None


def dump(config: Config) -> str:
    """The resolved configuration as YAML that `load` reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


@dataclass(frozen=True)
class KeyDoc:
    """One line of the reference."""

    name: str
    """Dotted; `model[llama].tie_embeddings` where it depends on the family."""
    allowed: str
    default: str
    meaning: str


def schema_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[KeyDoc]:
    """Every key of the schema."""
    for name, field in section.model_fields.items():
        dotted = prefix + name
        options = TAGGED_UNIONS.get(_untagged(dotted))
        if options:
            for tag, option in options.items():
                yield from schema_keys(option, f"{dotted}[{tag}].")
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from schema_keys(field.annotation, f"{dotted}.")
        else:
            default = "required" if field.is_required() else format_value(field.get_default(call_default_factory=True))
            yield KeyDoc(dotted, _allowed(field), default, " ".join((field.description or "").split()))


def _allowed(field: FieldInfo) -> str:
    """Which values a field takes, in words: its choices, or its type and range."""
    words: list[str] = []
    bounds: list[str] = []
    todo: list[Any] = [field.annotation, *field.metadata]
    while todo:
        each = todo.pop(0)
        if get_origin(each) is Literal:
            words += [format_value(choice) for choice in get_args(each)]
        elif get_args(each):
            todo += get_args(each)
        elif isinstance(each, FieldInfo):
            todo += each.metadata
        elif each in PYTHON_TYPE_NAMES:
            words.append(PYTHON_TYPE_NAMES[each])
        else:
            signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
            bounds += [f"{sign} {getattr(each, name)}" for name, sign in signs if hasattr(each, name)]
    return ", ".join(dict.fromkeys(words + bounds))


def _untagged(dotted: str) -> str:
    return re.sub(r"\[\w+\]", "", dotted)


def _override(data: dict[str, Any], word: str) -> None:
    dotted, equals, text = word.partition("=")
    if not equals or not re.fullmatch(r"[\w.]+", dotted):
        raise UserError(f"{word}: not an override; write section.key=value, for instance train.steps=100")
    try:
        value = yaml.load(text, ConfigYamlLoader)
    except yaml.YAMLError:
        value = text
    *parents, leaf = dotted.split(".")
    node = data
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise UserError(f"{word}: {parent} is a value, not a section")
        node = child
    node[leaf] = value


def _line(error: ErrorDetails) -> str:
    """One line for one pydantic error: the key, the value, the nearest valid one."""
    kind, context = error["type"], error.get("ctx", {})
    key, section = _locate(error["loc"])
    value = error["input"]
    shown = f"{key}={format_value(value)}"
    tag = f"{key}.family" if key == "model" else f"{key}.kind"
    if kind == "extra_forbidden":
        return f"{shown}: unknown key; nearest: {_nearest_key(key, section)}"
    if kind == "missing":
        return f"{key}: missing, and it has no default; needed: {_describe(section, key)}"
    if kind == "union_tag_not_found":
        return f"{tag}: missing; one of {', '.join(TAGGED_UNIONS[key])}"
    if kind == "union_tag_invalid":
        return f"{tag}={context['tag']}: not one of {', '.join(TAGGED_UNIONS[key])}; nearest: " + _closest(
            str(context["tag"]), list(TAGGED_UNIONS[key])
        )
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        return f"{shown}: not one of {', '.join(choices)}; nearest: {_closest(str(value), choices)}"
    if kind == "value_error":
        message = str(context["error"])
        if message.split("=")[0].isidentifier():  # a section's own check names its key without the section
            return f"{key}.{message}" if key else message
        return message if not key else f"{shown}: {message}"
    for bound, words in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
        if bound in context:
            limit = context[bound]
            return f"{shown}: must be {words} {limit}; nearest: {_inside(section, key, bound, limit)}"
    if kind == "string_pattern_mismatch":
        example = "my_module:my_function" if ":" in str(context["pattern"]) else "my-run.1"
        return f"{shown}: not of the form wanted; nearest: {example}"
    if kind == "tuple_type" and isinstance(value, str | int | float):
        return f"{shown}: not a list; nearest: [{format_value(value)}]"
    wanted = TYPE_NAMES.get(kind.split("_")[0], error["msg"])
    return f"{shown}: not {wanted}; nearest: {_default(section, key, value)}"


def _locate(loc: tuple[int | str, ...]) -> tuple[str, type[Section] | None]:
    """Dotted key without the union tags, and the section that holds its last part."""
    parts: list[str] = []
    section: type[Section] | None = Config
    for item in loc:
        dotted = ".".join(parts)
        if dotted in TAGGED_UNIONS and item in TAGGED_UNIONS[dotted]:
            section = TAGGED_UNIONS[dotted][str(item)]
            continue
        parts.append(str(item))
        inner = section.model_fields[str(item)].annotation if section and str(item) in section.model_fields else None
        if isinstance(inner, type) and issubclass(inner, Section) and item != loc[-1]:
            section = inner
    return ".".join(parts), section


def _nearest_key(key: str, section: type[Section] | None) -> str:
    prefix, _, leaf = key.rpartition(".")
    siblings = list(section.model_fields) if section else []
    close = difflib.get_close_matches(leaf, siblings, 1, 0.6)
    if close:
        return f"{prefix}.{close[0]}" if prefix else close[0]
    everywhere = [_untagged(each.name) for each in schema_keys()]
    same = [dotted for dotted in everywhere if dotted.split(".")[-1] == leaf]
    return (same or [_closest(key, everywhere)])[0]


def _describe(section: type[Section] | None, key: str) -> str:
    field = section.model_fields.get(key.split(".")[-1]) if section else None
    if field is None:
        return "see trainyard config --keys"
    if field.description:
        return " ".join(field.description.split())
    doc = getattr(field.annotation, "__doc__", None) if isinstance(field.annotation, type) else None
    return f"the section. {doc}" if doc else "the section"


def _default(section: type[Section] | None, key: str, value: object) -> str:
    """A valid value near a wrong one: the same number read as the right type, else the default, else the docstring."""
    field = section.model_fields.get(key.split(".")[-1]) if section else None
    if field is None:
        return "see trainyard config --keys"
    types = get_args(field.annotation) or (field.annotation,)
    number = next((kind for kind in types if kind in (int, float)), None)
    if number and isinstance(value, str | float) and not isinstance(value, bool):
        try:
            return format_value(number(float(value)))
        except (ValueError, OverflowError):
            pass
    if not field.is_required():
        return format_value(field.get_default(call_default_factory=True))
    return _describe(section, key)


def _inside(section: type[Section] | None, key: str, bound: str, limit: float) -> str:
    if bound in ("ge", "le"):
        return format_value(limit)
    default = _default(section, key, None)
    return (
        f"{default} (the default)"
        if default[:1].isdigit()
        else f"any number {'above' if bound == 'gt' else 'below'} {limit}"
    )


def _closest(word: str, choices: list[str]) -> str:
    return (difflib.get_close_matches(word, choices, 1, 0.0) or choices)[0]

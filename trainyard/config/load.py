"""Loading a configuration: YAML plus `section.key=value` overrides become a validated Config, or a one-line error."""

import copy
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from trainyard.config.errors import first_error_line, is_rule_of_section
from trainyard.config.recipes import find_config
from trainyard.config.registries import OBJECTIVES
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.core.section import Section
from trainyard.core.user_code import search_current_directory
from trainyard.core.yaml_io import ConfigYamlLoader, format_value, read_yaml
from trainyard.families import find_family
from trainyard.families.hf_config import from_hf
from trainyard.families.linear_wrapper import LINEAR_WRAPPERS
from trainyard.remote.credentials import keys_with_credentials, redact

SECTION_TAGS = {"model": ("family", "from_hf"), "model.rope_scaling": ("kind",)}
"""Keys that decide which other keys a section has: another value replaces the section of the base."""


Reader = Callable[[Path, str], dict[str, Any]]
"""Reads a file, which messages call by the given name, as plain data of our schema."""


def load(
    source: str | Path, overrides: Iterable[str] = (), read: Reader = lambda path, name: read_yaml(path)
) -> Config:
    """Load a YAML file, or a recipe by its name, merge it into its `base`, and apply overrides.

    `read` reads the file and its bases; commands pass one that imports files of other systems.
    """
    data = _read_with_bases(find_config(source), str(source), read, ())
    model = data.get("model")
    if isinstance(model, dict) and ":" in str(model.get("family", "")):
        search_current_directory()
    return parse(data, overrides, str(source))


def _read_with_bases(path: Path, name: str, read: Reader, chain: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file, merged into the one that it names as `base`. `chain` are the files that lead to this one."""
    chain = (*chain, path.resolve())
    data = read(path, name)
    if "base" not in data:
        return data
    base = data.pop("base")
    if not isinstance(base, str) or not base:
        raise UserError(f"{name}: base={format_value(base)}: not a recipe or file; nearest: tiny-llama")
    try:
        base_path = find_config(base, path.parent)
    except UserError as error:
        raise UserError(f"{name}: base={error}") from None
    if base_path.resolve() in chain:
        cycle = " -> ".join(file.name for file in (*chain[chain.index(base_path.resolve()) :], base_path))
        raise UserError(f"{name}: base={base}: the files are each other's base: {cycle}; remove one `base`")
    return _merge(_read_with_bases(base_path, str(base_path), read, chain), data)


def _merge(base: dict[str, Any], own: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Merge mappings key by key; any other value of `own`, a list too, replaces that of `base`."""
    merged = dict(base)
    for key, value in own.items():
        below, tags = base.get(key), SECTION_TAGS.get(f"{prefix}{key}", ())
        if isinstance(value, dict) and isinstance(below, dict):
            has_other_keys = any(tag in value and value[tag] != below.get(tag) for tag in tags)
            value = value if has_other_keys else _merge(below, value, f"{prefix}{key}.")
        merged[key] = value
    return merged


def warn_on_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def parse(data: dict[str, Any], overrides: Iterable[str] = (), source: str = "") -> Config:
    """Validate plain data as a Config. The first mistake becomes a UserError, with `source` in front."""
    data, prefix = copy.deepcopy(data), f"{source}: " if source else ""
    apply_overrides(data, overrides)
    if key := next(keys_with_credentials(data), None):
        raise UserError(
            f"{prefix}{key}: contains a password, token or signature, which would be stored with the run; nearest: "
            "HF_TOKEN, AWS_PROFILE or ~/.netrc, or `trainyard get` first"
        )
    try:
        return Config.model_validate(_add_score_head(_move_wrappers(_resolve_model(data))))
    except ValidationError as error:
        raise UserError(prefix + first_error_line(error.errors())) from None


def check_keys(data: dict[str, Any]) -> dict[str, Any]:
    """Validate every key by itself and return the data with all defaults. Rules between keys are not applied: the
    values may still change."""
    data = _add_score_head(_move_wrappers(_resolve_model(data)))
    try:
        Config.model_validate(data)
    except ValidationError as error:
        if mistakes := [mistake for mistake in error.errors() if not is_rule_of_section(mistake)]:
            raise UserError(first_error_line(mistakes)) from None
    classes: dict[str, Any] = {name: field.annotation for name, field in Config.model_fields.items()}
    classes["model"] = find_family(data["model"]["family"]).config_class
    for name, section in classes.items():
        if isinstance(section, type) and issubclass(section, Section):
            data = {**data, name: section.model_construct(**data.get(name, {})).model_dump(mode="json", warnings=False)}
    return data


def _resolve_model(data: dict[str, Any]) -> dict[str, Any]:
    """Replace model.from_hf by the keys of that config.json, which model.family reads if it is given. Other keys of the
    section take precedence."""
    model = data.get("model")
    if not isinstance(model, dict) or "from_hf" not in model:
        return data
    own_keys = {key: value for key, value in model.items() if key != "from_hf"}
    section = from_hf(str(model["from_hf"]), model.get("family"))
    return {**data, "model": {**section.model_dump(mode="json"), **own_keys}}


def _move_wrappers(data: dict[str, Any]) -> dict[str, Any]:
    """Move the sections of built-in wrappers of linear layers, such as `lora`, to where the model has them."""
    found = {name: data[name] for name in LINEAR_WRAPPERS.built_in if data.get(name) is not None}
    if not found:
        return {key: value for key, value in data.items() if key not in LINEAR_WRAPPERS.built_in}
    model = data.get("model")
    model = model if isinstance(model, dict) else {}
    linear = {**(model.get("linear") or {}), **found}
    rest = {key: value for key, value in data.items() if key not in found}
    return {**rest, "model": {**model, "linear": linear}}


def _add_score_head(data: dict[str, Any]) -> dict[str, Any]:
    """Give the model of train.objective=reward its head."""
    model, train = data.get("model"), data.get("train")
    name = train.get("objective") if isinstance(train, dict) else None
    if not isinstance(model, dict) or name not in OBJECTIVES.built_in or not OBJECTIVES.find(name).kind.scores_ends:
        return data
    return {**data, "model": {**model, "score_head": True}}


def dump(config: Config) -> str:
    """Return the resolved configuration as YAML, which `load` reads back to an equal Config. Credentials, which `parse`
    refuses, are left out."""
    return redact(yaml.safe_dump(plain_sections(config), sort_keys=False, allow_unicode=True, width=120))


def plain_sections(config: Config) -> dict[str, Any]:
    """The sections of a configuration as in a file: built-in wrappers of linear layers have sections of their own."""
    data: dict[str, Any] = {}
    for name, section in config.model_dump(mode="json").items():
        data[name] = section
        if name == "model":
            linear = section["linear"]
            data |= {wrapper: linear.pop(wrapper) for wrapper in LINEAR_WRAPPERS.built_in if wrapper in linear}
    return data


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> set[str]:
    """Set the keys of `section.key=value` overrides in plain data; returns the keys. A model.from_hf replaces the model
    of the file, whose keys would take precedence."""
    overrides, model = list(overrides), data.get("model")
    if any(override.startswith("model.from_hf=") for override in overrides):
        data["model"] = model if isinstance(model, dict) and "from_hf" in model else {}
    return {_apply_override(data, override) for override in overrides}


def _apply_override(data: dict[str, Any], override: str) -> str:
    dotted, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[\w.]+", dotted):
        raise UserError(f"{override}: not an override; write section.key=value, for instance train.steps=100")
    try:
        value = yaml.load(text, ConfigYamlLoader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        value = text
    *parents, leaf = dotted.split(".")
    node = data
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise UserError(f"{override}: {parent} is a value, not a section")
        node = child
    node[leaf] = value
    return dotted

"""Loading a configuration: YAML plus `section.key=value` overrides become a validated Config, or a one-line error."""

import copy
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from trainyard.config.errors import first_error_line
from trainyard.config.importers.key_table import ImportedConfig
from trainyard.config.importers.nxdt import is_nxdt
from trainyard.config.recipes import find_config
from trainyard.config.schema import Config
from trainyard.config.yaml_io import ConfigYamlLoader, read_yaml
from trainyard.core.errors import UserError
from trainyard.core.user_code import search_current_directory
from trainyard.download.credentials import keys_with_credentials, redact
from trainyard.families.hf_config import from_hf


def load(source: str | Path, overrides: Iterable[str] = (), warn: Callable[[str], None] | None = None) -> Config:
    """Load a YAML file, or a recipe by its name, and apply overrides.

    A file of NxD Training is imported; `warn` (default: print to standard error) receives what the import changes.
    """
    path = find_config(source)
    data = read_yaml(path)
    if ":" in str((data.get("model") or {}).get("family", "")):
        search_current_directory()
    if is_nxdt(data):
        from trainyard.config.importers.nxdt.convert import import_nxdt  # its tables are large; few files need them

        imported = import_nxdt(data, str(source), path.parent)
        note = f"{source}: a file of NxD Training; `trainyard import {source}` shows what its keys become"
        for line in (note, *imported.warnings):
            (warn or warn_on_stderr)(f"note: {line}")
        return validate_imported(imported, overrides, str(source))
    return parse(data, overrides, str(source))


def warn_on_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def parse(data: dict[str, Any], overrides: Iterable[str] = (), source: str = "") -> Config:
    """Validate plain data as a Config. The first mistake becomes a UserError, with `source` in front."""
    data = copy.deepcopy(data)
    apply_overrides(data, overrides)
    if key := next(keys_with_credentials(data), None):
        prefix = f"{source}: " if source else ""
        raise UserError(
            f"{prefix}{key}: contains a password, token or signature, which would be stored with the run; nearest: "
            "HF_TOKEN, AWS_PROFILE or ~/.netrc, or `trainyard get` first"
        )
    model = data.get("model")
    if isinstance(model, dict) and "from_hf" in model:
        own_keys = {key: value for key, value in model.items() if key != "from_hf"}
        data = {**data, "model": {**from_hf(str(model["from_hf"])).model_dump(mode="json"), **own_keys}}
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        prefix = f"{source}: " if source else ""
        raise UserError(prefix + first_error_line(error)) from None


def dump(config: Config) -> str:
    """Return the resolved configuration as YAML, which `load` reads back to an equal Config. Credentials, which `parse`
    refuses, are left out."""
    return redact(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120))


def validate_imported(imported: ImportedConfig, overrides: Iterable[str] = (), source: str = "") -> Config:
    """Validate an imported configuration. The error for a missing key tells where its value usually comes from."""
    try:
        return parse(imported.data, overrides, source)
    except UserError as error:
        hint = f" ({imported.missing_hint})" if imported.missing_hint and ": missing" in str(error) else ""
        raise UserError(f"{error}{hint}") from None


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> set[str]:
    """Set the keys of `section.key=value` overrides in plain data; returns the keys."""
    return {_apply_override(data, override) for override in overrides}


def _apply_override(data: dict[str, Any], override: str) -> str:
    dotted, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[\w.]+", dotted):
        raise UserError(f"{override}: not an override; write section.key=value, for instance train.steps=100")
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
            raise UserError(f"{override}: {parent} is a value, not a section")
        node = child
    node[leaf] = value
    return dotted

"""Finds model families: the built-in ones, those of installed packages, and `module:NAME` of any other."""

import importlib
import pkgutil
from dataclasses import replace
from functools import cache
from importlib import metadata

import trainyard.families.builtin as builtin
from trainyard.core.errors import UserError
from trainyard.core.user_code import describe_object, load_object, nearest_name
from trainyard.families.family import Family
from trainyard.families.model_config import ModelConfig

BUILT_IN = tuple(module.name for module in pkgutil.iter_modules(builtin.__path__))
"""Files of families/builtin, each with a FAMILY of that name."""
ENTRY_POINT_GROUP = "trainyard.families"
"""Installed packages offer families by entry points of this group: `qwen = "my_models.qwen:FAMILY"`."""


@cache
def all_families() -> dict[str, Family]:
    """The built-in families and those of installed packages, by name."""
    modules = (importlib.import_module(f"trainyard.families.builtin.{name}") for name in BUILT_IN)
    families: dict[str, Family] = {name: module.FAMILY for name, module in zip(BUILT_IN, modules, strict=True)}
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        families.setdefault(entry.name, _import_family(f"{entry.module}:{entry.attr}", entry.name))
    return families


@cache
def find_family(name: str) -> Family:
    """The family with this name. Raises UserError if there is none."""
    if name in BUILT_IN:
        family: Family = importlib.import_module(f"trainyard.families.builtin.{name}").FAMILY
        return family
    if ":" in name:
        return _import_family(name, name)
    families = all_families()
    if name not in families:
        raise UserError(f"not one of {', '.join(families)}, or module:NAME{nearest_name(name, families)}")
    return families[name]


def family_of(model: ModelConfig) -> Family:
    return find_family(model.family)


def _import_family(path: str, name: str) -> Family:
    """Import `module:NAME`. Only modules on the Python path: a checkpoint must not run code from where it lies."""
    family = load_object(path, "a trainyard.Family")
    if not isinstance(family, Family):
        module, _, attribute = path.partition(":")
        raise UserError(f"expected a trainyard.Family as {attribute} in {module}, found {describe_object(family)}")
    return replace(family, name=name)  # the name by which a configuration finds it again

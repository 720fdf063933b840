"""Registries: what one may add to the package (model families, update rules, loggers, ...), found by name.

A built-in object is one file of a package, found by its file name. An installed package offers objects by entry points,
and any other module by `module:NAME`. Nothing is imported before it is asked for, so a registry of objects that need
torch can list their names to code that does not import it.
"""

import importlib
import pkgutil
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Generic, TypeVar, cast

from trainyard.core.errors import UserError
from trainyard.core.user_code import import_object, import_subclass, is_user_path, load_object, nearest_name

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects of one class, or subclasses of it, by name."""

    def __init__(
        self,
        package: str,
        constant: str,
        group: str,
        base: str,
        key: str = "",
        of_classes: bool = False,
        first: tuple[str, ...] = (),
    ) -> None:
        """`package` has one file per built-in object, which is its `constant`. `group` names the entry points of other
        packages: `lion = "my_optimizers:Lion"` in `[project.entry-points.GROUP]`. `base` is the class of the objects as
        `module:Class`, imported when it is needed; `of_classes` tells that the objects are its subclasses. `key` is the
        configuration key that names an object, for messages; without one, modules in the current directory are not
        found. Documentation and messages list the names `first` before the others."""
        self.package, self.constant, self.group, self.base = package, constant, group, base
        self.key, self.of_classes, self.first = key, of_classes, first

    @cached_property
    def built_in(self) -> tuple[str, ...]:
        """Names of the built-in objects."""
        spec = find_spec(self.package)
        locations = spec.submodule_search_locations if spec else None
        found = sorted(module.name for module in pkgutil.iter_modules(locations or ()))
        return (*self.first, *(name for name in found if name not in self.first))

    def installed(self) -> dict[str, str]:
        """`module:NAME` of the objects of installed packages, by name."""
        entries = metadata.entry_points(group=self.group)
        return {entry.name: f"{entry.module}:{entry.attr}" for entry in entries if entry.name not in self.built_in}

    def find(self, name: str) -> T:
        """The object with this name. Raises UserError if there is none."""
        if name in self.built_in:
            return cast(T, getattr(importlib.import_module(f"{self.package}.{name}"), self.constant))
        if is_user_path(name):
            return self._import(name)
        installed = self.installed()
        if name not in installed:
            names = self.names()
            known = f"one of {', '.join(names)}, or module:NAME" if names else "module:NAME of an installed package"
            raise UserError(f"not {known}{nearest_name(name, names)}")
        return self._import(installed[name])

    def names(self) -> tuple[str, ...]:
        """The names of the built-in objects and of those of installed packages."""
        return (*self.built_in, *self.installed())

    def _import(self, path: str) -> T:
        base: Any = load_object(self.base, "a class")
        load: Any = import_subclass if self.of_classes else import_object
        return cast(T, load(path, self.key, base))

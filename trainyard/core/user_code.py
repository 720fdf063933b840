"""Imports functions and classes of the user by `module:name`."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from trainyard.core.errors import UserError, one_line


def search_current_directory() -> None:
    """Let modules in the current directory be imported."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def import_function(dotted: str, key: str, kind: str = "function") -> Callable[..., Any]:
    """Import `module:function`, also from the current directory. `key` is the config key, for error messages."""
    module, _, name = dotted.partition(":")
    search_current_directory()
    try:
        function = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # the module is the user's: anything may happen in it
        label = "" if isinstance(error, ImportError | SyntaxError) else f"{type(error).__name__}: "
        raise UserError(f"{key}={dotted}: cannot import {module}: {label}{one_line(error)}") from None
    if not callable(function):
        raise UserError(f"{key}={dotted}: {module} has no {kind} {name}")
    return function

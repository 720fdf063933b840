"""Loggers by the names in log.loggers."""

from collections.abc import Sequence
from importlib.util import find_spec

from trainyard.config.registries import LOGGERS
from trainyard.core.errors import UserError
from trainyard.metrics.loggers.base import Logger


def logger_class(name: str) -> type[Logger]:
    """The class of a logger. The package that a built-in one needs has its name, and so has the extra that installs it.
    Raises UserError if there is none."""
    if name in LOGGERS.built_in and find_spec(name) is None:
        raise UserError(
            f"log.loggers={name}: needs the package {name}, which is not installed: pip install 'trainyard[{name}]'"
        )
    found: type[Logger] = LOGGERS.find(name)
    return found


def check_loggers(names: Sequence[str]) -> None:
    """Raise UserError if a logger cannot be used."""
    for name in names:
        logger_class(name).check()

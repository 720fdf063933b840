"""Loggers by the names in log.loggers."""

import importlib.util
from collections.abc import Sequence
from importlib import import_module

from trainyard.core.errors import UserError
from trainyard.core.user_code import import_subclass
from trainyard.metrics.loggers.base import Logger

BUILTIN = {
    "tensorboard": ("tensorboard_logger", "TensorBoardLogger"),
    "wandb": ("wandb_logger", "WandbLogger"),
    "mlflow": ("mlflow_logger", "MlflowLogger"),
}
"""Module and class of each built-in logger. Its package has the same name, and so has the extra that installs it."""


def logger_class(name: str) -> type[Logger]:
    """The class of a built-in logger, or the user's class `module:Class`. Raises UserError if there is none."""
    if name not in BUILTIN:
        return import_subclass(name, "log.loggers", Logger)
    if importlib.util.find_spec(name) is None:
        raise UserError(
            f"log.loggers={name}: needs the package {name}, which is not installed: pip install 'trainyard[{name}]'"
        )
    module, class_name = BUILTIN[name]
    builtin: type[Logger] = getattr(import_module(f"trainyard.metrics.loggers.{module}"), class_name)
    return builtin


def check_loggers(names: Sequence[str]) -> None:
    """Raise UserError if a logger cannot be used."""
    for name in names:
        logger_class(name).check()

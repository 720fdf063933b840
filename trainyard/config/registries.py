"""What keys of the configuration name and one may add: update rules, data sources, loggers, objectives.

Each is one file of the package named here, or an object of another package. Reading a configuration imports the files
of update rules, data sources and objectives, so these import no torch.
"""

from typing import Any

from trainyard.core.registry import Registry

UPDATE_RULES: Registry[Any] = Registry(
    "trainyard.train.optim.rules",
    "RULE",
    "trainyard.optimizers",
    "trainyard.train.optim.update_rule:UpdateRule",
    "optimizer.kind",
    of_classes=True,
)
"""Subclasses of trainyard.UpdateRule by optimizer.kind."""
LOGGERS: Registry[Any] = Registry(
    "trainyard.metrics.loggers.builtin",
    "LOGGER",
    "trainyard.loggers",
    "trainyard.metrics.loggers.base:Logger",
    "log.loggers",
    of_classes=True,
    first=("tensorboard", "wandb", "mlflow"),
)
"""Subclasses of trainyard.Logger by log.loggers."""
SOURCES: Registry[Any] = Registry(
    "trainyard.data.sources",
    "SOURCE",
    "trainyard.data_sources",
    "trainyard.data.source:DataSource",
    "data.source",
    first=("text", "tokens", "arrow", "hdf5", "chat", "preference", "prompts", "synthetic"),
)
"""Instances of trainyard.DataSource by data.source."""
OBJECTIVES: Registry[Any] = Registry(
    "trainyard.train.objectives",
    "OBJECTIVE",
    "trainyard.objectives",
    "trainyard.train.objective:Objective",
    "train.objective",
    of_classes=True,
)
"""Subclasses of Objective (PairLoss, PolicyLoss) by train.objective."""

"""Trainyard: pre-train language models on any number of devices from one YAML file.

from trainyard import Trainer, load
Trainer(load("tiny-llama", ["train.steps=50"])).run()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainyard.config.load import load
    from trainyard.config.schema import Config
    from trainyard.data.loading.dataset import Dataset
    from trainyard.data.source import DataSource
    from trainyard.devices.base import Device
    from trainyard.devices.kind import DeviceKind
    from trainyard.families.family import Family
    from trainyard.families.hf_config import from_hf
    from trainyard.families.linear_wrapper import LinearWrapper
    from trainyard.formats.hf import load_model
    from trainyard.metrics.loggers.base import Logger
    from trainyard.run.callbacks import Callback
    from trainyard.run.trainer import Trainer
    from trainyard.train.loss import Loss
    from trainyard.train.optim.update_rule import UpdateRule
    from trainyard.train.pair_loss import PairLoss
    from trainyard.train.policy_loss import PolicyLoss

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Config",
    "DataSource",
    "Dataset",
    "Device",
    "DeviceKind",
    "Family",
    "LinearWrapper",
    "Logger",
    "Loss",
    "PairLoss",
    "PolicyLoss",
    "Trainer",
    "UpdateRule",
    "from_hf",
    "load",
    "load_model",
]

_EXPORTS = {
    "Config": "trainyard.config.schema",
    "Callback": "trainyard.run.callbacks",
    "DataSource": "trainyard.data.source",
    "Dataset": "trainyard.data.loading.dataset",
    "Device": "trainyard.devices.base",
    "DeviceKind": "trainyard.devices.kind",
    "Family": "trainyard.families.family",
    "LinearWrapper": "trainyard.families.linear_wrapper",
    "Logger": "trainyard.metrics.loggers.base",
    "Loss": "trainyard.train.loss",
    "PairLoss": "trainyard.train.pair_loss",
    "PolicyLoss": "trainyard.train.policy_loss",
    "Trainer": "trainyard.run.trainer",
    "UpdateRule": "trainyard.train.optim.update_rule",
    "from_hf": "trainyard.families.hf_config",
    "load": "trainyard.config.load",
    "load_model": "trainyard.formats.hf",
}


def __getattr__(name: str) -> Any:
    """Import an exported name on first use, so that `trainyard --help` does not import torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'trainyard' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)

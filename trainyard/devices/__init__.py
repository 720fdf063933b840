"""Devices: no other package names one. `builtin` has a file per device, which needs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainyard.devices.registry import DEVICES, select

if TYPE_CHECKING:
    from trainyard.devices.base import Device


def __getattr__(name: str) -> Any:
    """Import Device on first use, so that checking a config does not import torch."""
    if name != "Device":
        raise AttributeError(f"module 'trainyard.devices' has no attribute {name!r}")
    return import_module("trainyard.devices.base").Device

"""Devices: no other package names one. `builtin` has a file per device, which needs no torch.

Exports that need torch load on first use, so that checking a config does not import it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainyard.devices.registry import DEVICES, select

if TYPE_CHECKING:
    from trainyard.devices.base import CompileOptions, Device, PeakThroughput
    from trainyard.devices.meta import MetaDevice, as_fake

_EXPORTS = {
    **dict.fromkeys(("CompileOptions", "Device", "PeakThroughput"), "base"),
    **dict.fromkeys(("MetaDevice", "as_fake"), "meta"),
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'trainyard.devices' has no attribute {name!r}")
    return getattr(import_module(f"trainyard.devices.{_EXPORTS[name]}"), name)

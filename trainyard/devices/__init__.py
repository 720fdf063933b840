"""One small file per device; no other package names a device.

Exports load on first use, so that importing devices.names (to check a config) does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainyard.devices.names import ATTENTION_KERNELS, DEVICE_NAMES

if TYPE_CHECKING:
    from trainyard.devices.base import CompileOptions, Device, PeakThroughput
    from trainyard.devices.meta import MetaDevice, as_fake
    from trainyard.devices.registry import DEVICES, select

_EXPORTS = {
    "DEVICES": "registry",
    "CompileOptions": "base",
    "Device": "base",
    "MetaDevice": "meta",
    "PeakThroughput": "base",
    "as_fake": "meta",
    "select": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'trainyard.devices' has no attribute {name!r}")
    return getattr(import_module(f"trainyard.devices.{_EXPORTS[name]}"), name)

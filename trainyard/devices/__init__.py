"""One small file per device. Nothing outside this package names one."""

from trainyard.core.errors import UserError
from trainyard.devices.base import CompileOptions, Device, PeakThroughput
from trainyard.devices.cpu import CpuDevice
from trainyard.devices.cuda import CudaDevice
from trainyard.devices.meta import MetaDevice, as_fake
from trainyard.devices.neuron.device import NeuronDevice
from trainyard.devices.neuron.xla_device import XlaDevice

DEVICES: tuple[type[Device], ...] = (CudaDevice, NeuronDevice, XlaDevice, CpuDevice)
"""In the order in which `auto` prefers them."""

DEVICE_NAMES = ("auto", *(device.name for device in DEVICES))
ATTENTION_KERNELS = ("auto", *(name for device in DEVICES for name in device.attention_kernels))

__all__ = [
    "ATTENTION_KERNELS",
    "DEVICES",
    "DEVICE_NAMES",
    "CompileOptions",
    "Device",
    "MetaDevice",
    "PeakThroughput",
    "as_fake",
    "select",
]


def select(name: str) -> Device:
    """The device called `name`; `auto` takes the best that this machine has."""
    here = [device for device in DEVICES if device.available()]
    for device in here:
        if name in ("auto", device.name):
            return device()
    why = next((device.unavailable_reason() for device in DEVICES if device.name == name), "not known")
    raise UserError(f"device.name={name}: {why}; here: {', '.join(device.name for device in here)}, auto")

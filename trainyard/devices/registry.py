"""All devices, and the choice of one by name."""

from trainyard.core.errors import UserError
from trainyard.devices.base import Device
from trainyard.devices.cpu import CpuDevice
from trainyard.devices.cuda import CudaDevice
from trainyard.devices.neuron.device import NeuronDevice
from trainyard.devices.neuron.xla_device import XlaDevice

DEVICES: tuple[type[Device], ...] = (CudaDevice, NeuronDevice, XlaDevice, CpuDevice)
"""In the order in which `auto` prefers them. names.py repeats their names for code that must not import torch."""


def select(name: str) -> Device:
    """Return the device called `name`; `auto` picks the best one available on this machine."""
    reasons = {device: device.unavailable_reason() for device in DEVICES}
    available = [device for device, reason in reasons.items() if reason is None]
    for device in available:
        if name in ("auto", device.name):
            return device()
    reason = next((reason for device, reason in reasons.items() if device.name == name), "unknown device")
    names = ", ".join(device.name for device in available)
    raise UserError(f"device.name={name}: {reason}; available: {names}, auto")

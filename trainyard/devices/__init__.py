"""One small file per device. Nothing outside this package names one."""

from trainyard.core.errors import UserError
from trainyard.devices.base import Compiling, Device, Peak
from trainyard.devices.cpu import Cpu
from trainyard.devices.cuda import Cuda
from trainyard.devices.meta import Nowhere, traced
from trainyard.devices.neuron.device import Neuron
from trainyard.devices.neuron.xla_device import Xla

DEVICES: tuple[type[Device], ...] = (Cuda, Neuron, Xla, Cpu)
"""In the order in which `auto` prefers them."""

NAMES = ("auto", *(device.name for device in DEVICES))
ATTENTIONS = ("auto", *(name for device in DEVICES for name in device.attentions))

__all__ = ["ATTENTIONS", "DEVICES", "NAMES", "Compiling", "Device", "Nowhere", "Peak", "select", "traced"]


def select(name: str) -> Device:
    """The device called `name`; `auto` takes the best that this machine has."""
    here = [device for device in DEVICES if device.available()]
    for device in here:
        if name in ("auto", device.name):
            return device()
    why = next((device.missing() for device in DEVICES if device.name == name), "not known")
    raise UserError(f"device.name={name}: {why}; here: {', '.join(device.name for device in here)}, auto")

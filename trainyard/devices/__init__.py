"""One small file per device. Nothing outside this package names one."""

from trainyard.devices.base import Device, Peak
from trainyard.devices.cpu import Cpu
from trainyard.devices.cuda import Cuda
from trainyard.devices.nowhere import Nowhere
from trainyard.errors import UserError

DEVICES: tuple[type[Device], ...] = (Cuda, Cpu)
"""In the order in which `auto` prefers them."""

NAMES = ("auto", *(device.name for device in DEVICES))
ATTENTIONS = ("auto", *(name for device in DEVICES for name in device.attentions))

__all__ = ["ATTENTIONS", "DEVICES", "NAMES", "Device", "Nowhere", "Peak", "select"]


def select(name: str) -> Device:
    """The device called `name`; `auto` takes the best that this machine has."""
    here = [device for device in DEVICES if device.available()]
    for device in here:
        if name in ("auto", device.name):
            return device()
    raise UserError(f"device.name={name}: not on this machine; here: {', '.join(device.name for device in here)}, auto")

"""Finds devices: the built-in ones, those of installed packages, and `module:NAME` of any other. Only `select` imports
torch."""

from typing import TYPE_CHECKING

from trainyard.core.errors import UserError
from trainyard.core.registry import Registry
from trainyard.core.user_code import import_subclass, is_user_path
from trainyard.devices.kind import DeviceKind

if TYPE_CHECKING:
    from trainyard.devices.base import Device

DEVICES: Registry[DeviceKind] = Registry(
    "trainyard.devices.builtin",
    "DEVICE",
    "trainyard.devices",
    "trainyard.devices.kind:DeviceKind",
    "device.name",
    first=("cuda", "neuron", "xla", "cpu"),
)
"""Kinds of devices by device.name."""


def all_devices() -> dict[str, DeviceKind]:
    """The kinds of devices by name, in the order in which `auto` prefers them: the host comes last."""
    kinds = {name: DEVICES.find(name) for name in DEVICES.names()}
    return dict(sorted(kinds.items(), key=lambda item: item[1].is_host))


def device_aliases() -> dict[str, str]:
    """Other words for devices, and the name that `device.name` accepts."""
    return {alias: name for name, kind in all_devices().items() for alias in kind.aliases}


def always_compiles(name: str, hardware: str) -> bool:
    """True for a device that compiles every graph, with or without compile.enabled. `hardware` is that of the file."""
    compiling = {known: kind.aliases for known, kind in all_devices().items() if kind.always_compiles}
    if name != "auto":
        return name in compiling
    return any(alias in hardware for aliases in compiling.values() for alias in aliases)


def select(name: str) -> "Device":
    """Return the device called `name`; `auto` picks the best one available on this machine."""
    from trainyard.devices.base import Device

    kinds = all_devices() | ({name: DEVICES.find(name)} if is_user_path(name) else {})
    classes = {known: import_subclass(kind.module, "", Device) for known, kind in kinds.items()}  # type: ignore[type-abstract]
    reasons = {known: device_class.unavailable_reason() for known, device_class in classes.items()}
    available = [known for known, reason in reasons.items() if reason is None]
    for known in available:
        if name in ("auto", known):
            return classes[known]()
    reason = reasons.get(name, "unknown device")
    raise UserError(f"device.name={name}: {reason}; available: {', '.join(available)}, auto")

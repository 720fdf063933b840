"""Utilization, memory and power of the devices of this machine, read from the vendors' tools. Imports no torch: a
monitor must not allocate anything on a device that trains."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import psutil


class DeviceReading(NamedTuple):
    """The state of one device now; None where its tool does not say."""

    name: str
    """Such as GPU 3, or core 12."""
    utilization: float | None
    """Fraction of the time in which the device was busy, 0 to 1."""
    memory_used: int | None
    """Bytes."""
    memory_total: int | None
    power_watts: float | None = None


class HostReading(NamedTuple):
    """The state of this host now."""

    cpu: float
    """Fraction of all cores that is busy, 0 to 1."""
    cores: int
    memory_used: int
    """Bytes."""
    memory_total: int


class DeviceMonitor(ABC):
    """Reads one kind of device."""

    @abstractmethod
    def read(self) -> list[DeviceReading]:
        """The devices now; empty if nothing is known yet."""

    def problem(self) -> str:
        """Why nothing is known, for people; empty if there is no problem."""
        return ""

    def close(self) -> None:
        """End what the monitor has started."""
        return


class MissingMonitor(DeviceMonitor):
    """Devices about which this machine cannot tell anything."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def read(self) -> list[DeviceReading]:
        return []

    def problem(self) -> str:
        return self.reason


class HostMonitor:
    """Reads CPU and RAM of this host."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # the first call starts the interval that the next one measures

    def read(self) -> HostReading:
        memory = psutil.virtual_memory()
        return HostReading(
            psutil.cpu_percent() / 100, psutil.cpu_count() or 1, int(memory.total - memory.available), int(memory.total)
        )

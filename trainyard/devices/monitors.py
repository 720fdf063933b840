"""The monitors of the accelerators of this machine."""

from pathlib import Path

from trainyard.devices.neuron.monitor import open_neuron_monitor
from trainyard.devices.nvml import open_nvml_monitor
from trainyard.devices.utilization import DeviceMonitor


def open_monitors(root: Path = Path("/")) -> list[DeviceMonitor]:
    """A monitor for each kind of accelerator; `root` is that of the file system."""
    monitors: list[DeviceMonitor] = []
    if any((root / "dev").glob("nvidia[0-9]*")):
        monitors.append(open_nvml_monitor())
    if any((root / "dev").glob("neuron[0-9]*")):
        monitors.append(open_neuron_monitor())
    return monitors

"""NVIDIA GPUs, read through NVML (the package nvidia-ml-py)."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from trainyard.core.errors import one_line
from trainyard.devices.utilization import DeviceMonitor, DeviceReading, MissingMonitor


def open_nvml_monitor() -> DeviceMonitor:
    """A monitor of all GPUs; one that says what is missing if there is no NVML."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return MissingMonitor("GPUs: pip install 'trainyard[nvidia]' shows them")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return MissingMonitor(f"GPUs: NVML does not start: {one_line(error)}")
    return NvmlMonitor(nvml)


class NvmlMonitor(DeviceMonitor):
    """Reads GPUs. A GPU, or a value of one, that cannot be read is left out: it may be lost or not support it."""

    def __init__(self, nvml: Any) -> None:
        """`nvml` is the module pynvml, initialized."""
        self.nvml = nvml

    def read(self) -> list[DeviceReading]:
        nvml, readings = self.nvml, []
        for index in range(self._value(nvml.nvmlDeviceGetCount) or 0):
            handle = self._value(nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is None:
                readings.append(DeviceReading(f"GPU {index} (lost)", None, None, None))
                continue
            rates = self._value(nvml.nvmlDeviceGetUtilizationRates, handle)
            memory = self._value(nvml.nvmlDeviceGetMemoryInfo, handle)
            milliwatts = self._value(nvml.nvmlDeviceGetPowerUsage, handle)
            readings.append(
                DeviceReading(
                    f"GPU {index}",
                    None if rates is None else rates.gpu / 100,
                    None if memory is None else int(memory.used),
                    None if memory is None else int(memory.total),
                    None if milliwatts is None else milliwatts / 1000,
                )
            )
        return readings

    def close(self) -> None:
        self._value(self.nvml.nvmlShutdown)

    def _value(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self.nvml.NVMLError:
            return None

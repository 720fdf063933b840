"""Utilization, memory and power of the devices of this machine, read from the vendors' tools. Imports no torch: a
monitor must not allocate anything on a device that trains.

NVIDIA GPUs are read through NVML (the package nvidia-ml-py), Trainium through AWS's neuron-monitor, which prints one
JSON object per period.
"""

import json
import shutil
import subprocess
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from trainyard.core.errors import one_line


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


TOOL = "neuron-monitor"
MONITOR_CONFIG = {
    "period": "1s",
    "neuron_runtimes": [
        {"tag_filter": ".*", "metrics": [{"type": "neuroncore_counters"}, {"type": "memory_used"}]},
    ],
    "system_metrics": [],
}
END_S = 2.0
"""Limit of the wait for the end of neuron-monitor."""
MAX_CORES = 1024
MAX_LINE = 1 << 24


def open_neuron_monitor() -> DeviceMonitor:
    """Start neuron-monitor; a monitor that says what is missing if it is not installed."""
    tool = shutil.which(TOOL)
    if not tool:
        return MissingMonitor(f"NeuronCores: {TOOL} is not found; the package aws-neuronx-tools has it")
    try:
        return NeuronMonitor(tool)
    except OSError as error:
        return MissingMonitor(f"NeuronCores: {TOOL} does not start: {error.strerror}")


class NeuronMonitor(DeviceMonitor):
    """Runs neuron-monitor and keeps its latest report."""

    def __init__(self, tool: str) -> None:
        self.config = tempfile.NamedTemporaryFile("w", prefix="trainyard-", suffix=".json")  # noqa: SIM115
        json.dump(MONITOR_CONFIG, self.config)
        self.config.flush()
        self.latest: list[DeviceReading] = []
        self.process = subprocess.Popen(
            [tool, "-c", self.config.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for the caller, who then ends this process
        )
        threading.Thread(target=self._read_reports, daemon=True).start()

    def read(self) -> list[DeviceReading]:
        return self.latest if self.process.poll() is None else []

    def problem(self) -> str:
        code = self.process.poll()
        return "" if code is None else f"NeuronCores: {TOOL} has ended with exit code {code}"

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.config.close()

    def _read_reports(self) -> None:
        assert self.process.stdout
        while line := self.process.stdout.readline(MAX_LINE):
            readings = parse_report(line)
            if readings is not None:
                self.latest = readings


def parse_report(line: bytes) -> list[DeviceReading] | None:
    """The cores in a line of neuron-monitor; None if it is not a report. Missing and null fields are left out."""
    try:
        report = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(report, dict):
        return None
    hardware = _mapping(report, "neuron_hardware_info")
    utilization: dict[int, float] = {}
    memory: dict[int, int] = {}
    for runtime in _items(report, "neuron_runtime_data"):
        used = _mapping(runtime, "report", "memory_used", "neuron_runtime_used_bytes", "usage_breakdown")
        for core, sizes in _mapping(used, "neuroncore_memory_usage").items():
            if core.isdecimal() and isinstance(sizes, dict):
                used_bytes = sum(int(_number(sizes, kind) or 0) for kind in sizes)
                memory[int(core)] = memory.get(int(core), 0) + used_bytes
        for core, counters in _mapping(runtime, "report", "neuroncore_counters", "neuroncores_in_use").items():
            percent = _number(counters, "neuroncore_utilization")
            if core.isdecimal() and percent is not None:
                utilization[int(core)] = max(utilization.get(int(core), 0.0), percent / 100)
    per_device = _number(hardware, "neuroncore_per_device_count") or 0
    size = _number(hardware, "neuron_device_memory_size")
    total = int(size / per_device) if size is not None and per_device > 0 else None
    count = int(min(max((_number(hardware, "neuron_device_count") or 0) * per_device, 0), MAX_CORES))
    cores = sorted({*range(count), *utilization, *memory})
    return [DeviceReading(f"core {core}", utilization.get(core, 0.0), memory.get(core), total) for core in cores]


def _number(values: Any, key: str) -> float | None:
    """A number of a mapping; None if it is missing, null or something else."""
    value = values.get(key) if isinstance(values, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < 2**63 else None


def _mapping(value: Any, *keys: str) -> dict[str, Any]:
    """The mapping at a path of keys; empty if a part of it is missing or null."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _items(value: dict[str, Any], key: str) -> list[Any]:
    items = value.get(key)
    return items if isinstance(items, list) else []


def open_monitors(root: Path = Path("/")) -> list[DeviceMonitor]:
    """A monitor for each kind of accelerator; `root` is that of the file system."""
    monitors: list[DeviceMonitor] = []
    if any((root / "dev").glob("nvidia[0-9]*")):
        monitors.append(open_nvml_monitor())
    if any((root / "dev").glob("neuron[0-9]*")):
        monitors.append(open_neuron_monitor())
    return monitors

"""Readings of devices: neuron-monitor's documented JSON, NVML's absence, and the host against /proc."""

import copy
import json
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from trainyard.core.constants import GIB
from trainyard.devices.monitors import (
    DeviceReading,
    HostMonitor,
    NeuronMonitor,
    open_monitors,
    open_neuron_monitor,
    open_nvml_monitor,
    parse_report,
)


def monitor_report(utilization: float, tensors: int) -> dict[str, Any]:
    """A report of a trn1.2xlarge with one runtime on two cores, after the user guide of neuron-monitor."""
    core = {"constants": 2**20, "model_code": 2**20, "model_shared_scratchpad": 0, "runtime_memory": 0}
    return {
        "neuron_runtime_data": [
            {
                "pid": 1234,
                "address": "1234",
                "neuron_runtime_tag": "1234",
                "error": "",
                "report": {
                    "neuroncore_counters": {
                        "period": 1.0,
                        "neuroncores_in_use": {
                            "0": {"neuroncore_utilization": utilization, "flops": 123},
                            "1": {"neuroncore_utilization": None},
                        },
                        "error": "",
                    },
                    "memory_used": {
                        "period": 1.0,
                        "neuron_runtime_used_bytes": {
                            "host": 5,
                            "neuron_device": 7,
                            "usage_breakdown": {
                                "host": {"application_memory": 1},
                                "neuroncore_memory_usage": {"0": {**core, "tensors": tensors}, "1": None},
                            },
                        },
                        "loaded_models": [],
                        "error": "",
                    },
                },
            }
        ],
        "system_data": {"memory_info": None},
        "instance_info": {"instance_type": "trn1.2xlarge", "error": ""},
        "neuron_hardware_info": {
            "neuron_device_type": "trainium",
            "neuron_device_count": 1,
            "neuron_device_memory_size": 32 * GIB,
            "neuroncore_per_device_count": 2,
            "error": "",
        },
    }


def test_report_of_neuron_monitor() -> None:
    line = json.dumps(monitor_report(42.5, 3 * GIB)).encode()
    used = 3 * GIB + 2 * 2**20
    assert parse_report(line) == [
        DeviceReading("core 0", 0.425, used, 16 * GIB),
        DeviceReading("core 1", 0.0, None, 16 * GIB),
    ]


def test_no_runtime_means_idle_cores() -> None:
    report = monitor_report(0, 0) | {"neuron_runtime_data": []}
    cores = parse_report(json.dumps(report).encode())
    assert cores == [DeviceReading(f"core {index}", 0.0, None, 16 * GIB) for index in (0, 1)]


def json_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in items for found in json_paths(item, (*path, key)))]


PATHS = [path for path in json_paths(monitor_report(42.5, 1)) if path]


@examples(300)
@given(
    st.lists(st.sampled_from(PATHS), max_size=3),
    st.sampled_from([None, [], {}, "", "x", -1, 1e400, True, {"0": None}, [None], {"x": 1}]),
    st.booleans(),
)
def test_missing_and_null_fields_are_tolerated(paths: list[tuple[Any, ...]], value: Any, remove: bool) -> None:
    report: Any = monitor_report(42.5, 1)
    for path in paths:
        parent = report
        try:
            for key in path[:-1]:
                parent = parent[key]
            if remove:
                del parent[path[-1]]
            else:
                parent[path[-1]] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):
            continue
    assert isinstance(parse_report(json.dumps(report).encode()), list)


@pytest.mark.parametrize("line", [b"", b"\xff\n", b"[1]\n", b'{"neuron', b"[" * 100_000])
def test_other_lines_are_no_reports(line: bytes) -> None:
    assert parse_report(line) is None


def fake_tool(directory: Path, body: str) -> str:
    path = directory / "neuron-monitor"
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_latest_report_of_a_running_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = [json.dumps(monitor_report(percent, GIB)) for percent in (10.0, 90.0)]
    body = f"""
import json, sys, time
assert json.load(open(sys.argv[sys.argv.index("-c") + 1]))["period"] == "1s"
for line in [{reports[0]!r}, "torn", {reports[1]!r}]:
    print(line, flush=True)
time.sleep(60)
"""
    tool = fake_tool(tmp_path, body)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monitor = open_neuron_monitor()
    assert isinstance(monitor, NeuronMonitor)
    assert monitor.process.args[0] == tool  # type: ignore[index]
    wait_until(lambda: monitor.read() and monitor.read()[0].utilization == 0.9)
    assert monitor.problem() == ""
    monitor.close()
    assert monitor.process.poll() is not None
    assert monitor.read() == []


def test_a_monitor_that_ends_is_a_problem_and_not_an_error(tmp_path: Path) -> None:
    monitor = NeuronMonitor(fake_tool(tmp_path, "raise SystemExit(3)"))
    wait_until(monitor.problem)
    assert monitor.problem() == "NeuronCores: neuron-monitor has ended with exit code 3"
    monitor.close()


def test_a_machine_without_the_tools_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_monitors(tmp_path) == []
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/neuron0").touch()
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if the package were not installed
    problems = [monitor.problem() for monitor in open_monitors(tmp_path)]
    assert problems == [
        "GPUs: pip install 'trainyard[nvidia]' shows them",
        "NeuronCores: neuron-monitor is not found; the package aws-neuronx-tools has it",
    ]


def test_a_machine_without_a_driver_has_no_nvml() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        monitor = open_nvml_monitor()
        assert monitor.read() == []
        assert monitor.problem().startswith("GPUs: NVML does not start: ")
    else:
        pytest.skip("this machine has a GPU")


def test_the_host_agrees_with_the_kernel() -> None:
    reading = HostMonitor().read()
    assert reading.cores == psutil.cpu_count()
    assert 0 <= reading.cpu <= 1
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    assert reading.memory_total == total
    assert abs(reading.memory_used - (total - available)) < GIB

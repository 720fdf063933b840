"""The state of devices and of who holds them, from the system's files and tools. Imports no torch: a device that is in
use or broken must not stop the diagnosis."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainyard.core.constants import GIB, MIB
from trainyard.core.finding import Finding
from trainyard.core.quantities import counted
from trainyard.devices.neuron import compile_cache
from trainyard.devices.neuron.topology import detect_instance

QUERY_TIMEOUT_S = 20
STALE_MINUTES = 60
"""Least age of a lock of the Neuron compiler without a holder: a host that shares the cache may hold it unseen."""
HELD_MIB = 100
"""Memory that another process may hold on a GPU, for a display for instance."""


def device_findings(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Findings about all devices of this machine; `root` is that of its file system."""
    chips = sorted((root / "dev").glob("neuron[0-9]*"))
    instance = detect_instance(root, environ)
    if chips or instance.generation:
        yield from _neuron_findings(root, chips, environ)
    has_gpu = bool(list((root / "dev").glob("nvidia[0-9]*")))
    if has_gpu:
        yield from _gpu_findings()
    if not chips and not instance.generation and not has_gpu:
        yield Finding("devices", "ok", "no accelerator; runs use the CPU")


def _neuron_findings(root: Path, chips: list[Path], environ: Mapping[str, str]) -> Iterator[Finding]:
    modules = (root / "proc/modules").read_text() if (root / "proc/modules").exists() else ""
    module = re.search(r"^neuron (\d+) (\d+)", modules, re.MULTILINE)
    if not module:
        fix = "sudo modprobe neuron; if that fails: reinstall the package aws-neuronx-dkms"
        yield Finding("neuron driver", "error", "the kernel module neuron is not loaded", fix)
    elif not chips:
        fix = "sudo rmmod neuron && sudo modprobe neuron"
        yield Finding("neuron driver", "error", "loaded, but there is no /dev/neuron*", fix)
    else:
        holders = _open_files(root, "/dev/neuron")
        count = int(module[2])
        yield Finding("neuron driver", "ok", f"loaded, {counted(len(chips), 'chip')}, in use by {count}")
        for pid, command in holders.items():
            yield Finding("neuron cores", "warning", f"process {pid} holds them: {command}", f"kill {pid}")
        if count and not holders:
            text = f"the driver counts {counted(count, 'user')}, but no process has a chip open"
            yield Finding("neuron driver", "warning", text, "sudo rmmod neuron && sudo modprobe neuron")
    location = compile_cache.cache_location(environ)
    if "://" not in location and Path(location).is_dir():
        entries = compile_cache.list_entries(location)
        stale = [lock for entry in entries for lock in compile_cache.stale_locks(entry, STALE_MINUTES)]
        if stale:
            locks = f"{counted(len(stale), 'lock')} of compilers that no longer run"
            yield Finding(
                "neuron compile cache",
                "warning",
                f"{location}: {locks}, for which the next run would wait",
                f"trainyard cache clear-locks --neuron {location} --minutes {STALE_MINUTES}",
                lambda: f"{counted(len(compile_cache.clear_locks(entries, STALE_MINUTES)), 'lock')} removed",
            )


def _open_files(root: Path, prefix: str) -> dict[int, str]:
    """Processes that have a file open whose path starts with `prefix`, and their commands."""
    found: dict[int, str] = {}
    for process in (root / "proc").glob("[0-9]*"):
        try:
            opened = any(os.readlink(link).startswith(prefix) for link in (process / "fd").iterdir())
            if opened:
                found[int(process.name)] = _command(process)
        except OSError:  # it ended, or belongs to another user
            continue
    return found


def _command(process: Path) -> str:
    words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return " ".join(words).strip()[:80]


def _gpu_findings() -> Iterator[Finding]:
    tool = shutil.which("nvidia-smi")
    if not tool:
        fix = "install the NVIDIA driver's utilities"
        yield Finding("gpu", "warning", "nvidia-smi is not found, so nothing is known about the GPUs", fix)
        return
    fields = "index,name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
    gpus, problem = _query([tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    if problem:
        yield Finding("gpu", "error", problem, "reboot, or reload the NVIDIA driver")
        return
    for index, name, total, used, ecc in gpus:
        yield Finding(f"gpu {index}", "ok", f"{name}, {int(total) * MIB / GIB:.0f} GiB, {used} MiB in use")
        if ecc.isdigit() and int(ecc):
            text = f"{ecc} uncorrectable memory errors"
            yield Finding(f"gpu {index}", "error", text, f"sudo nvidia-smi --gpu-reset -i {index}, or replace it")
    processes, _ = _query([tool, "--query-compute-apps=pid,used_memory,process_name", "--format=csv,noheader,nounits"])
    for pid, memory, command in processes:
        if not memory.isdigit() or int(memory) >= HELD_MIB:
            yield Finding("gpu memory", "warning", f"process {pid} holds {memory} MiB: {command}", f"kill {pid}")


def _query(command: list[str]) -> tuple[list[list[str]], str]:
    """The rows of a table that nvidia-smi prints, and a problem if it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer within {QUERY_TIMEOUT_S} s"
    if done.returncode:
        return [], f"nvidia-smi: {' '.join((done.stdout or done.stderr).split())}"
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()], ""

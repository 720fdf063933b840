"""Checks of one host: versions, limits, memory, disk, clock, name and ports, and what earlier runs left behind: ranks
of this user whose launcher is gone, and copies of their state in memory."""

import ctypes
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil

from trainyard.core.constants import GIB
from trainyard.core.disk_space import free_bytes
from trainyard.core.finding import Finding
from trainyard.core.world import FIRST_DERIVED_PORT, MAX_PORT

PACKAGES = ("trainyard", "torch", "numpy", "torch-xla", "torch-neuronx", "neuronx-cc")
MIN_OPEN_FILES = 4096
MIN_SHARED_MEMORY = GIB
MIN_FREE_DISK = 10 * GIB
STA_UNSYNC = 0x40
"""Bit of adjtimex's status: the clock is not synchronized."""
PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
GRACE_S = 5.0
MEMORY_DIRECTORY = Path("/dev/shm")
"""The default of checkpoint.memory_directory."""
ABANDONED_S = 3600.0
"""Age after which a run that makes copies has no processes any more."""


def host_findings() -> Iterator[Finding]:
    yield from _versions()
    yield from _limits()
    yield from _memory()
    yield from _clock()
    yield from _name()
    yield from _ports()


def _versions() -> Iterator[Finding]:
    installed = []
    for package in PACKAGES:
        try:
            installed.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    yield Finding("versions", "ok", f"Python {platform.python_version()}, {', '.join(installed)}")


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        text = f"{soft}; ranks open a socket for every other rank, and files of the data"
        fix = f"ulimit -n {hard}" if hard >= MIN_OPEN_FILES else "set nofile 65536 in /etc/security/limits.conf"
        yield Finding("open files", "warning", text, fix)
    else:
        yield Finding("open files", "ok", f"{soft}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    adapters = sorted(Path("/sys/class/infiniband").glob("*"))
    if adapters and locked != resource.RLIM_INFINITY:
        text = f"{locked // 1024} KiB; the network adapter {adapters[0].name} maps more"
        yield Finding("locked memory", "error", text, "set memlock unlimited in /etc/security/limits.conf")


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield Finding("memory", "ok", f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free")
    if Path("/dev/shm").is_dir() and (size := shutil.disk_usage("/dev/shm").total) < MIN_SHARED_MEMORY:
        text = f"/dev/shm has {size / GIB:.2f} GiB; ranks of one host exchange data there"
        yield Finding(
            "shared memory", "warning", text, "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
        )
    free = free_bytes(Path(tempfile.gettempdir()))
    if free < MIN_FREE_DISK:
        text = f"{tempfile.gettempdir()}: {free / GIB:.1f} GiB free; compilers and conversions need more"
        yield Finding("disk", "warning", text, "remove files, or set TMPDIR to a larger disk")


def _clock() -> Iterator[Finding]:
    status = _clock_status()
    if status is not None and status & STA_UNSYNC:
        text = "not synchronized; Slurm, locks and the order of failures on several hosts depend on it"
        yield Finding("clock", "warning", text, "sudo systemctl enable --now chrony")
    elif status is not None:
        yield Finding("clock", "ok", "synchronized")


def _clock_status() -> int | None:
    """Status bits of the kernel's clock; None if the system does not tell."""

    class Timex(ctypes.Structure):
        _fields_ = (
            ("modes", ctypes.c_uint),
            ("offset", ctypes.c_long),
            ("freq", ctypes.c_long),
            ("maxerror", ctypes.c_long),
            ("esterror", ctypes.c_long),
            ("status", ctypes.c_int),
            ("rest", ctypes.c_byte * 256),
        )

    try:
        record = Timex()
        code = ctypes.CDLL(None).adjtimex(ctypes.byref(record))
    except (OSError, AttributeError):
        return None
    return None if code < 0 else record.status


def _name() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        text = f"{name} has no address; gloo and Slurm's srun look it up"
        yield Finding("host name", "error", text, f"add a line ADDRESS {name} to /etc/hosts")
        return
    if address.startswith("127."):
        text = f"{name} is {address}, which other hosts cannot reach; fine for runs on this host alone"
        yield Finding("host name", "ok", text, "for several hosts: set GLOO_SOCKET_IFNAME, or correct /etc/hosts")
    else:
        yield Finding("host name", "ok", f"{name} is {address}")


def _ports() -> Iterator[Finding]:
    try:
        low, high = (int(word) for word in Path(PORT_RANGE).read_text().split())
    except (OSError, ValueError):
        return
    if high >= FIRST_DERIVED_PORT:
        text = f"outgoing connections use {low} to {high}, and may take the port where the ranks of a job meet"
        fix = f"sudo sysctl -w net.ipv4.ip_local_port_range='{low} {FIRST_DERIVED_PORT - 1}', or set MASTER_PORT"
        yield Finding("ports", "warning", text, fix)
    else:
        yield Finding("ports", "ok", f"jobs meet on {FIRST_DERIVED_PORT} to {MAX_PORT}")


def leftover_findings(memory: Path = MEMORY_DIRECTORY) -> Iterator[Finding]:
    yield from _ranks()
    for run in sorted((memory / f"trainyard-{os.getuid()}").glob("*/")):
        files = [path.stat() for path in run.rglob("*") if path.is_file()]
        age = time.time() - max((file.st_mtime for file in files), default=run.stat().st_mtime)
        if age > ABANDONED_S:
            size = sum(file.st_size for file in files) / GIB
            text = f"{run} has {size:.1f} GiB, copies of the state of a run that has not trained for {age / 3600:.0f} h"
            yield Finding("leftovers", "warning", text, f"rm -r {run}", lambda run=run: _remove(run))  # type: ignore[misc]


def _remove(directory: Path) -> str:
    shutil.rmtree(directory)
    return f"{directory} removed"


def _ranks() -> Iterator[Finding]:
    ranks = [process for process in psutil.process_iter() if _is_orphaned_rank(process)]
    if not ranks:
        yield Finding("leftovers", "ok", "no rank without a launcher")
    for process in ranks:
        text = f"process {process.pid} is a rank whose launcher is gone"
        yield Finding("leftovers", "warning", text, f"kill {process.pid}", lambda process=process: _end(process))  # type: ignore[misc]


def _is_orphaned_rank(process: psutil.Process) -> bool:
    """True for `python -m trainyard` with a rank, of this user, that process 1 has adopted."""
    try:
        is_ours = process.uids().real == os.getuid() and "trainyard" in process.cmdline()[:3]
        return is_ours and process.ppid() == 1 and process.pid != os.getpid() and "RANK" in process.environ()
    except (psutil.Error, OSError):
        return False


def _end(process: psutil.Process) -> str:
    process.terminate()
    deadline = time.monotonic() + GRACE_S
    while process.is_running() and time.monotonic() < deadline:
        time.sleep(0.1)
    if process.is_running():
        process.kill()
    return f"process {process.pid} ended"

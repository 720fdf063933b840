"""Where compiled code is kept between runs, and what must agree for it to be used again.

    ROOT/torch-VERSION-ARCHITECTURE-HASH/          one for each toolchain; HASH is of all that `fingerprint` says
        fxgraph/  aotautograd/                     torch's index: a graph's key to what was compiled for it
        xx/  triton/  locks/                       the code itself
        fingerprint.json  runs/  logs/             ours

torch's own keys hold the graph, its flags and torch's version. They do not hold the C++ compiler nor the CPU's
instructions, which differ between hosts that share a home directory; hence a directory for each. Where a file system
has no locks that hold between hosts, each host has its own.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from trainyard import compat
from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import UserError
from trainyard.devices import Device
from trainyard.parallel.mesh import local_rank

CACHE_VARIABLE = "TRAINYARD_CACHE"
"""Environment variable with the directory of all caches."""
LIMIT_VARIABLE = "TRAINYARD_CACHE_GIB"
"""Environment variable with the most that they may take, in GiB."""
DEFAULT_LIMIT_GIB = 50.0
TORCH_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""What torch reads. Set by the user, it is the directory itself: who shares one with other programs says so."""
FINGERPRINT_FILE = "fingerprint.json"
UNSAFE_FILE_SYSTEMS = {"nfs", "nfs4", "lustre", "efs", "cifs", "smb3", "beegfs", "gpfs", "glusterfs", "9p", "afs"}
"""File systems whose locks may not hold between hosts."""
LEFTOVER_FILE = re.compile(r".*\.part|\.\d+\.\d+\.tmp")
"""What a killed compiler leaves: ours, and torch's."""
LEFTOVER_AGE_S = 3600.0
"""Seconds after which such a file is nobody's."""


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    home = Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "trainyard" / "inductor"
    return Path(environ.get(CACHE_VARIABLE) or home).expanduser().absolute()


def size_limit(environ: Mapping[str, str] = os.environ) -> int:
    """Bytes that all caches may take."""
    text = environ.get(LIMIT_VARIABLE) or str(DEFAULT_LIMIT_GIB)
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < float("inf"):
        raise UserError(f"{LIMIT_VARIABLE}={text}: must be a number of GiB above 0; default: {DEFAULT_LIMIT_GIB:g}")
    return int(found * 2**30)


def fingerprint(device: Device) -> dict[str, str]:
    """All that must be the same for compiled code to be used again, besides the graph and its flags."""
    return {
        "torch": torch.version.__version__,
        "triton": _package_version("triton"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "compiler": _compiler_version(),
        "architecture": device.architecture(),
    }


def toolchain_name(fingerprint: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:8]
    words = f"torch-{fingerprint['torch']}-{fingerprint['architecture']}-{digest}"
    return re.sub(r"[^\w.+-]", "_", words)


def cache_dir(device: Device) -> Path:
    """Where this run keeps what it compiles."""
    if place := user_cache_dir():
        return place
    place = cache_root()
    if file_system(place) in UNSAFE_FILE_SYSTEMS:
        place = place / f"host-{platform.node()}"
    return place / toolchain_name(fingerprint(device))


def prepare_cache(device: Device) -> Path:
    """The directory, made and mended, as torch's too. Once for each process, before anything is compiled."""
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        raise UserError(
            "compile.enabled=true: no C++ compiler (g++) on this machine; install one, or compile.enabled=false"
        )
    most = size_limit()
    place = cache_dir(device)
    place.mkdir(parents=True, exist_ok=True)
    said = place / FINGERPRINT_FILE
    if not said.exists():
        atomic_write_text(said, json.dumps(fingerprint(device), indent=2) + "\n")
    for path in damaged_files(place):
        path.unlink(missing_ok=True)
    if not user_cache_dir() and local_rank() == 0:
        trim(cache_root(), most)
    os.environ[TORCH_CACHE_VARIABLE] = str(place)
    compat.install_atomic_cpp_builds()
    return place


def user_cache_dir() -> Path | None:
    """What TORCH_PLACE says, if somebody chose it: torch sets it to a place of its own when its compiler is imported,
    which a kernel or a user's own code may do before this is asked."""
    place = os.environ.get(TORCH_CACHE_VARIABLE)
    return Path(place).absolute() if place and place != compat.default_inductor_dir() else None


def file_system(path: Path, mounts: str | None = None) -> str:
    """The type of the file system that `path` is on or will be; empty where the system does not say."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text()
        except OSError:
            return ""
    best, kind = "", ""
    for line in mounts.splitlines():
        _, point, found, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, found
    return kind


def list_files(place: Path) -> Iterator[Path]:
    """Every file below, but none through a link."""
    for base, _, names in os.walk(place):
        yield from (Path(base) / each for each in names if not os.path.islink(os.path.join(base, each)))


def damaged_files(place: Path) -> list[Path]:
    """Libraries that are cut off, and what killed compilers left."""
    now, found = time.time(), []
    for path in list_files(place):
        try:
            left = LEFTOVER_FILE.fullmatch(path.name) and now - path.stat().st_mtime > LEFTOVER_AGE_S
            if left or (path.suffix == ".so" and not _is_complete_library(path)):
                found.append(path)
        except OSError:  # gone in the meantime
            continue
    return found


def trim(place: Path, max_bytes: int) -> int:
    """Remove what was used longest ago until four fifths of `most` are left; nothing if less is taken. Gives the bytes
    that are gone. Use is what the file system notes when a file is read, which is good to a day; the files of a graph
    are used together, and torch makes again what it misses."""
    found = []
    for path in list_files(place):
        if path.parent.name == "locks" or path.name == FINGERPRINT_FILE:
            continue
        try:
            about = path.stat()
        except OSError:
            continue
        found.append((max(about.st_atime, about.st_mtime), about.st_size, path))
    total, gone = sum(size for _, size, _ in found), 0
    if total <= max_bytes:
        return 0
    for _, size, path in sorted(found):
        if total - gone <= max_bytes * 4 // 5:
            break
        path.unlink(missing_ok=True)
        gone += size
    return gone


def _is_complete_library(path: Path) -> bool:
    """Whether an ELF file ends where its table of sections, which comes last, does. Other kinds are not looked into."""
    with path.open("rb") as file:
        head = file.read(64)
    if head[:4] == b"\x7fELF" and len(head) == 64:
        (start,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
        return bool(start) and path.stat().st_size >= start + size * count
    return len(head) == 64 and head[:4] != b"\x7fELF" and any(head)


def _package_version(what: str) -> str:
    try:
        return version(what)
    except PackageNotFoundError:
        return "none"


def _compiler_version() -> str:
    """The C++ compiler as it says itself."""
    for each in filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++")):
        if found := shutil.which(each):
            done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
            return done.stdout.partition("\n")[0]
    return "none"

"""The on-disk cache of inductor's compiled code, with one directory per toolchain.

    ROOT/torch-VERSION-ARCHITECTURE-HASH/          one per toolchain; HASH is of `fingerprint`
        fxgraph/  aotautograd/                     torch's index: from graph keys to compiled artifacts
        xx/  triton/  locks/                       compiled code and torch's locks
        fingerprint.json  runs/  logs/             written by trainyard

torch's keys contain the graph, the compiler flags and torch's version, but neither the C++ compiler nor the CPU's
instruction set, which differ between hosts that share a home directory; hence a directory per toolchain. On a file
system whose locks do not work between hosts, each host has its own directory.
"""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path

import psutil
import torch

from trainyard import compat
from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.constants import GIB
from trainyard.core.errors import UserError
from trainyard.core.user_cache import user_cache
from trainyard.devices import Device

CACHE_VARIABLE = "TRAINYARD_CACHE"
"""Environment variable: directory of all caches."""
LIMIT_VARIABLE = "TRAINYARD_CACHE_GIB"
"""Environment variable: size limit of all caches in GiB."""
DEFAULT_LIMIT_GIB = 50.0
TORCH_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's variable. If the user sets it, use exactly that directory (it may be shared with other programs)."""
FINGERPRINT_FILE = "fingerprint.json"
UNSAFE_FILE_SYSTEMS = {"nfs", "nfs4", "lustre", "efs", "cifs", "smb3", "beegfs", "gpfs", "glusterfs", "9p", "afs"}
"""File systems whose locks may not work between hosts."""
LEFTOVER_FILE = re.compile(r".*\.part|\.\d+\.\d+\.tmp")
"""Temporary files that a killed compiler leaves: from trainyard and from torch."""
LEFTOVER_AGE_S = 3600.0
"""Age after which a temporary file has no owner."""
WRAPPER_START = "#!/bin/sh\n# trainyard: compile to a temporary file and rename it when it is complete.\n"
COMPILER_WRAPPER = """\
target= previous=
for argument in "$@"; do
    [ "$previous" = -o ] && target=$argument
    previous=$argument
done
[ -n "$target" ] || exec "$compiler" "$@"
part=$target.$$.part previous=
for argument in "$@"; do
    shift
    [ "$previous" = -o ] && set -- "$@" "$part" || set -- "$@" "$argument"
    previous=$argument
done
"$compiler" "$@"
status=$?
[ $status = 0 ] && mv -f "$part" "$target" || rm -f "$part"
exit $status
"""


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    return Path(environ.get(CACHE_VARIABLE) or user_cache("inductor", environ=environ)).expanduser().absolute()


def size_limit(environ: Mapping[str, str] = os.environ) -> int:
    """Size limit of all caches in bytes."""
    text = environ.get(LIMIT_VARIABLE) or str(DEFAULT_LIMIT_GIB)
    try:
        gib = float(text)
    except ValueError:
        gib = -1.0
    if not 0 < gib < float("inf"):
        raise UserError(f"{LIMIT_VARIABLE}={text}: must be a positive number of GiB; default: {DEFAULT_LIMIT_GIB:g}")
    return int(gib * GIB)


def fingerprint(device: Device) -> dict[str, str]:
    """Everything compiled code depends on besides the graph and its flags."""
    return {
        "torch": torch.version.__version__,
        "triton": next((package.version for package in distributions(name="triton")), "none"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "compiler": _compiler_version(),
        "architecture": device.architecture(),
    }


def toolchain_name(fingerprint: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:8]
    name = f"torch-{fingerprint['torch']}-{fingerprint['architecture']}-{digest}"
    return re.sub(r"[^\w.+-]", "_", name)


def cache_dir(device: Device) -> Path:
    """The cache directory of this device's toolchain."""
    if directory := user_cache_dir():
        return directory
    directory = cache_root()
    if file_system(directory) in UNSAFE_FILE_SYSTEMS:
        directory = directory / f"host-{platform.node()}"
    return directory / toolchain_name(fingerprint(device))


def prepare_cache(device: Device, local_rank: int = 0) -> Path:
    """Create and repair the cache directory and point torch at it. Call once per process, before the first compile."""
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        raise UserError(
            "compile.enabled=true: no C++ compiler (g++) on this machine; install one, or set compile.enabled=false"
        )
    limit = size_limit()
    directory = cache_dir(device)
    directory.mkdir(parents=True, exist_ok=True)
    fingerprint_path = directory / FINGERPRINT_FILE
    if not fingerprint_path.exists():
        atomic_write_text(fingerprint_path, json.dumps(fingerprint(device), indent=2) + "\n")
    for path in damaged_files(directory):
        path.unlink(missing_ok=True)
    if not user_cache_dir() and local_rank == 0:
        trim(cache_root(), limit)
    os.environ[TORCH_CACHE_VARIABLE] = str(directory)
    _wrap_compiler(directory)
    return directory


def _wrap_compiler(directory: Path) -> None:
    """Put a wrapper of inductor's C++ compiler first on PATH that writes its output atomically.

    A killed compiler would leave a truncated library, object file or precompiled header under its final name, and every
    later run would fail on it. Inductor's worker processes and launched ranks inherit PATH. A CXX that is an absolute
    path is not wrapped.
    """
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    real = shutil.which(compiler)
    if os.sep in compiler or real is None or _is_wrapper(Path(real)):
        return
    wrapper = directory / ".bin" / compiler
    wrapper.parent.mkdir(exist_ok=True)
    draft = wrapper.with_name(f"{compiler}.{os.getpid()}")
    draft.write_text(f"{WRAPPER_START}compiler={shlex.quote(real)}\n{COMPILER_WRAPPER}")
    draft.chmod(0o755)
    draft.replace(wrapper)
    os.environ["PATH"] = f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}"


def _is_wrapper(path: Path) -> bool:
    """True for a wrapper that this process or its parent has put on PATH. Wrapping it again would write files twice."""
    with path.open("rb") as file:
        return file.read(len(WRAPPER_START)) == WRAPPER_START.encode()


def user_cache_dir() -> Path | None:
    """The directory in TORCH_CACHE_VARIABLE if the user chose it. (torch sets the variable to its default when its
    compiler is imported, which a kernel or user code may already have done.)"""
    directory = os.environ.get(TORCH_CACHE_VARIABLE)
    return Path(directory).absolute() if directory and directory != compat.default_inductor_dir() else None


def file_system(path: Path) -> str:
    """Type of the file system of `path`, which need not exist yet; empty if unknown."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    mounts.sort(key=lambda mount: len(mount.mountpoint))  # of two mounts at one point the later one counts
    return mounts[-1].fstype if mounts else ""


def list_files(directory: Path) -> Iterator[Path]:
    """All files below a directory, without following links."""
    for base, _, names in os.walk(directory):
        yield from (Path(base) / name for name in names if not os.path.islink(os.path.join(base, name)))


def damaged_files(directory: Path) -> list[Path]:
    """Truncated libraries and leftovers of killed compilers."""
    now, damaged = time.time(), []
    for path in list_files(directory):
        try:
            is_leftover = LEFTOVER_FILE.fullmatch(path.name) and now - path.stat().st_mtime > LEFTOVER_AGE_S
            if is_leftover or (path.suffix == ".so" and not _is_complete_library(path)):
                damaged.append(path)
        except OSError:  # removed meanwhile
            continue
    return damaged


def trim(directory: Path, max_bytes: int) -> int:
    """If the cache exceeds `max_bytes`, remove the least recently used files until four fifths of that remain. Returns
    the number of bytes removed.

    Use is the file system's access time, which is accurate to a day. All files of a graph are used together, and torch
    recreates what is missing.
    """
    files = []
    for path in list_files(directory):
        if path.parent.name == "locks" or path.name == FINGERPRINT_FILE:
            continue
        try:
            stat = path.stat()
        except OSError:
            continue
        files.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    total, removed_bytes = sum(size for _, size, _ in files), 0
    if total <= max_bytes:
        return 0
    for _, size, path in sorted(files):
        if total - removed_bytes <= max_bytes * 4 // 5:
            break
        path.unlink(missing_ok=True)
        removed_bytes += size
    return removed_bytes


def _is_complete_library(path: Path) -> bool:
    """True if an ELF file reaches the end of its section table, which comes last. Other formats are only checked for a
    header."""
    with path.open("rb") as file:
        head = file.read(64)
    if head[:4] == b"\x7fELF" and len(head) == 64:
        (start,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
        return bool(start) and path.stat().st_size >= start + size * count
    return len(head) == 64 and head[:4] != b"\x7fELF" and any(head)


def _compiler_version() -> str:
    """First line of the C++ compiler's --version."""
    for compiler in filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++")):
        if path := shutil.which(compiler):
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            return done.stdout.partition("\n")[0]
    return "none"

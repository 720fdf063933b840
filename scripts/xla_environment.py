"""Create the environment in which the XLA path is tested, once per machine, and print how to start its Python.

    scripts/xla_environment

torch_xla 2.9.0 is the last release on PyPI and needs torch 2.9.0, so this environment is separate from .venv. It is in
~/.cache/trainyard (or XDG_CACHE_HOME), named by a hash of its inputs: changed inputs create another one. It is built
under a temporary name and renamed when complete. About 2.4 GB and two minutes. Progress goes to stderr.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
XLA, TORCH = "torch_xla==2.9.0", "torch==2.9.0"
PYTHONS = ((3, 11), (3, 12), (3, 13))
"""Python versions for which both have wheels."""
EXTRA_PACKAGES = ("typing_extensions", "sympy", "networkx", "jinja2", "filelock", "pytest", "hatchling")
"""Dependencies of torch without the CUDA libraries, and those of the tests, which install trainyard itself."""
START_SCRIPT = """#!/bin/sh
# Made by scripts/xla_environment.py: torch_xla is linked to a shared libpython.
LD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" exec "$(dirname "$0")/python" "$@"
"""
STALE_BUILD_S = 24 * 3600
"""Seconds after which an unfinished build counts as abandoned."""


def main() -> None:
    if sys.version_info[:2] not in PYTHONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        _exit_with_error(
            f"Python {sys.version.split()[0]}: {XLA} has wheels for {known}; run this script with one of them"
        )
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        _exit_with_error(f"{sys.platform} on {os.uname().machine}: {XLA} only has wheels for Linux on x86_64")
    packages = project_packages()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trainyard"
    target = cache / f"xla-{environment_hash(packages)}"
    start = target / "bin" / "start"
    if not start.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _remove_stale_builds(cache)
        build(target, packages)
    print(start)


def project_packages() -> list[str]:
    """Return the dependencies of trainyard except torch, in the versions of the lock file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=!~\[ ]", need, maxsplit=1)[0] for need in project["dependencies"]]
    lock = (ROOT / "requirements-test.lock").read_text().split()
    locked = {line.partition("==")[0]: line for line in lock if "==" in line}
    return [locked.get(each, each) for each in (*names, *EXTRA_PACKAGES) if each != "torch"]


def environment_hash(packages: list[str]) -> str:
    parts = [
        sys.version,
        sys.base_prefix,
        *packages,
        *(path.read_text() for path in (Path(__file__), HERE / "cuda_stubs.py")),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def build(target: Path, packages: list[str]) -> None:
    """Build the environment and rename it to its final name when complete."""
    libraries = ensure_system_packages()
    start_time = time.monotonic()

    def progress(line: str) -> None:
        print(f"test-xla: {time.monotonic() - start_time:4.0f} s  {line}", file=sys.stderr, flush=True)

    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.building-", dir=target.parent))
    try:
        progress(f"building {target}, about 2.4 GB, once")
        venv.create(work, with_pip=True)
        python = str(work / "bin" / "python")
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        progress(f"installing {XLA} and {len(packages)} other packages")
        _run(*pip, XLA, *packages)
        progress(f"installing {TORCH} without the CUDA libraries")
        _run(*pip, "--no-deps", TORCH)
        progress("building stubs for the CUDA libraries")
        site = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        _run(python, str(HERE / "cuda_stubs.py"), site)
        start = work / "bin" / "start"
        start.write_text(START_SCRIPT.format(libraries=libraries))
        start.chmod(0o755)
        progress("testing it")
        _run(str(start), "-c", "import torch_xla; torch_xla.device()", PJRT_DEVICE="CPU")
        try:
            work.rename(target)
        except OSError:  # another process was faster
            if not target.exists():
                raise
        progress("ready")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def ensure_system_packages() -> Path:
    """Return the directory of the shared libpython. As root on Debian or Ubuntu, install missing packages."""
    library = f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"
    missing = [tool for tool, command in (("gcc", "gcc"), ("binutils", "readelf")) if not shutil.which(command)]
    if not _directory_of(library):
        missing.append(library.removesuffix(".so.1.0"))
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"test-xla: installing system packages: {' '.join(missing)}", file=sys.stderr, flush=True)
        _run("apt-get", "update", "-qq")
        _run("apt-get", "install", "-qq", "-y", "--no-install-recommends", *missing, DEBIAN_FRONTEND="noninteractive")
    elif missing:
        _exit_with_error(f"missing system packages; install them first: sudo apt-get install {' '.join(missing)}")
    found = _directory_of(library)
    if found is None:
        _exit_with_error(f"{library}: not found; this Python was built without a shared library; use another one")
    return found


def _directory_of(library: str) -> Path | None:
    directories = [sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix) / "lib"]
    directories += [Path(root) / (sysconfig.get_config_var("MULTIARCH") or "") for root in ("/usr/lib", "/lib")]
    return next(
        (Path(directory) for directory in directories if directory and (Path(directory) / library).exists()), None
    )


def _remove_stale_builds(cache: Path) -> None:
    for path in cache.glob("xla-*.building-*"):
        if time.time() - path.stat().st_mtime > STALE_BUILD_S:
            shutil.rmtree(path, ignore_errors=True)


def _run(*command: str, **variables: str) -> str:
    done = subprocess.run(
        command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        _exit_with_error(f"`{' '.join(command[:6])} ...` failed with exit code {done.returncode}; its output is above")
    return done.stdout


def _exit_with_error(line: str) -> NoReturn:
    sys.exit(f"test-xla: {line}")


if __name__ == "__main__":
    main()

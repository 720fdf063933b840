"""Make the environment in which the XLA path is tested, once for a machine, and print how to start its Python.

    scripts/xla_environment

torch_xla 2.9.0 is the last on PyPI and needs torch 2.9.0, so this environment is not the clone's own. It lies under
~/.cache/trainyard (or XDG_CACHE_HOME), named by what it is made of; a changed recipe makes another one. It is built
under a temporary name and renamed when it is whole. About 2.4 GB and two minutes. Progress goes to stderr.
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
"""Those that both have wheels for."""
EXTRA_PACKAGES = ("typing_extensions", "sympy", "networkx", "jinja2", "filelock", "pytest")
"""What torch imports, less the CUDA libraries that it asks for; and what the tests need."""
START_SCRIPT = """#!/bin/sh
# Made by scripts/xla_environment.py: torch_xla is linked to a shared libpython.
LD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" exec "$(dirname "$0")/python" "$@"
"""
STALE_BUILD_S = 24 * 3600
"""Seconds after which something half built is nobody's."""


def main() -> None:
    if sys.version_info[:2] not in PYTHONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        _exit_with_error(f"Python {sys.version.split()[0]}: {XLA} has wheels for {known}; start this with one of them")
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        _exit_with_error(f"{sys.platform} on {os.uname().machine}: {XLA} has wheels for Linux on x86_64 alone")
    packages = project_packages()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trainyard"
    place = cache / f"xla-{environment_hash(packages)}"
    start = place / "bin" / "start"
    if not start.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _remove_stale_builds(cache)
        build(place, packages)
    print(start)


def project_packages() -> list[str]:
    """What trainyard imports, but for torch, in the versions of its lock file."""
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


def build(place: Path, packages: list[str]) -> None:
    """All of it, or nothing under that name."""
    libraries = ensure_system_packages()
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"test-xla: {time.monotonic() - began:4.0f} s  {line}", file=sys.stderr, flush=True)

    work = Path(tempfile.mkdtemp(prefix=f"{place.name}.building-", dir=place.parent))
    try:
        say(f"building {place}, about 2.4 GB, once")
        venv.create(work, with_pip=True)
        python = str(work / "bin" / "python")
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
        say(f"installing {XLA} and {len(packages)} other packages")
        _run(*pip, XLA, *packages)
        say(f"installing {TORCH} without the CUDA libraries")
        _run(*pip, "--no-deps", TORCH)
        say("making stand-ins for the CUDA libraries")
        site = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        _run(python, str(HERE / "cuda_stubs.py"), site)
        start = work / "bin" / "start"
        start.write_text(START_SCRIPT.format(libraries=libraries))
        start.chmod(0o755)
        say("trying it")
        _run(str(start), "-c", "import torch_xla; torch_xla.device()", PJRT_DEVICE="CPU")
        try:
            work.rename(place)
        except OSError:  # somebody else was faster
            if not place.exists():
                raise
        say("ready")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def ensure_system_packages() -> Path:
    """The directory of the shared libpython. As root on Debian or Ubuntu what is missing is installed."""
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
        _exit_with_error(f"{library}: not found; this Python was built without a shared library, take another one")
    return found


def _directory_of(library: str) -> Path | None:
    places = [sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix) / "lib"]
    places += [Path(root) / (sysconfig.get_config_var("MULTIARCH") or "") for root in ("/usr/lib", "/lib")]
    return next((Path(place) for place in places if place and (Path(place) / library).exists()), None)


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

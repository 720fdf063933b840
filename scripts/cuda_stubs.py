"""Make PyPI's torch, a CUDA build, importable without the gigabytes of CUDA libraries that it links.

    python scripts/cuda_stubs.py SITE_PACKAGES

Builds a stub next to torch's own libraries for each missing library, with the functions that torch's libraries import.
The stubs report that there is no GPU. Not for machines with a GPU. Needs gcc and binutils.
"""

import ctypes
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

LAZY_LIBRARIES = {"libcaffe2_nvrtc.so"}
"""Loaded when code is compiled for a GPU, not when torch is imported."""
NO_DEVICE = 100
"""cudaErrorNoDevice."""
RETURNS_STRING = re.compile(r"(String|Name|ncclGetLastError)$")
LAST_ERROR_CALL = re.compile(r"^cuda(GetLast|PeekAtLast)Error$")
"""Functions that report the error of an earlier call; the stubs return success."""


class SharedLibrary(NamedTuple):
    needed: list[str]
    """Names of the libraries that it links."""
    version_sources: dict[str, str]
    """The needed library that provides each symbol version."""
    defined_symbols: set[str]
    undefined_symbols: list[tuple[str, str]]
    """Symbols with their versions; the version may be empty."""


def main(site_packages: str) -> None:
    directory = Path(site_packages) / "torch" / "lib"
    paths = [path for path in sorted(directory.glob("*.so*")) if path.name not in LAZY_LIBRARIES]
    libraries = [read_library(path) for path in paths]
    linked = {name for library in libraries for name in library.needed} - {path.name for path in paths}
    system = {name: library for name in linked if (library := _load(name))}
    absent = linked - set(system)
    for name, symbols in missing_symbols(libraries, absent, list(system.values())).items():
        build_stub(directory / name, symbols)
    print(f"{len(absent)} stub libraries for CUDA in {directory}")


def read_library(path: Path) -> SharedLibrary:
    dynamic = _output("readelf", "--dynamic", "--wide", path)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    versions: dict[str, str] = {}
    source = ""
    for file, version in re.findall(r" File: (\S+)| Name: (\S+) +Flags", _output("readelf", "-V", "--wide", path)):
        source = file or source
        if version:
            versions[version] = source
    defined = {line.split()[-1].split("@")[0] for line in _symbols(path, "--defined-only")}
    undefined = []
    for line in _symbols(path, "--undefined-only"):
        kind, symbol = line.split()[-2:]
        name, _, version = symbol.partition("@")
        if kind == "U":  # other kinds are weak symbols, which may be missing
            undefined.append((name, version.lstrip("@")))
    return SharedLibrary(needed, versions, defined, undefined)


def missing_symbols(
    libraries: list[SharedLibrary], absent: set[str], system: list[ctypes.CDLL]
) -> dict[str, dict[str, set[str]]]:
    """Return the symbols of each absent library by version.

    A symbol without a version goes to any absent library that is loaded with it, unless torch, Python or the system
    provides it.
    """
    out: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in absent}
    defined = {name for library in libraries for name in library.defined_symbols}
    others = [ctypes.CDLL(None), *system]
    for library in libraries:
        candidates = [name for name in library.needed if name in absent]
        for name, version in library.undefined_symbols:
            if version:
                source = library.version_sources[version]
                if source in absent:
                    out[source][version].add(name)
            elif candidates and name not in defined and not any(hasattr(other, name) for other in others):
                out[candidates[0]][""].add(name)
    return out


def build_stub(path: Path, symbols: dict[str, set[str]]) -> None:
    names = sorted(name for group in symbols.values() for name in group)
    functions = "\n".join(f"{_return_type(name)} {name}(void) {{ return {_return_value(name)}; }}" for name in names)
    exported = "\n".join(
        f"{version} {{ global: {'; '.join(sorted(group))}; }};"
        for version, group in symbols.items()
        if version and group
    )
    with TemporaryDirectory() as work:
        code, script = Path(work, "stub.c"), Path(work, "versions")
        code.write_text(functions + "\n")
        script.write_text(exported + "\n")
        flags = ["-shared", "-fPIC", "-nostdlib", "-w", "-fno-builtin", f"-Wl,-soname,{path.name}"]
        subprocess.run(
            ["gcc", *flags, *([f"-Wl,--version-script={script}"] if exported else []), "-o", path, code], check=True
        )


def _return_type(name: str) -> str:
    return "const char*" if RETURNS_STRING.search(name) else "int"


def _return_value(name: str) -> str:
    if RETURNS_STRING.search(name):
        return '"no CUDA here"'
    return str(NO_DEVICE if name.startswith("cuda") and not LAST_ERROR_CALL.match(name) else 0)


def _load(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _symbols(path: Path, which: str) -> list[str]:
    return [line for line in _output("nm", "-D", "--with-symbol-versions", which, path).splitlines() if line.strip()]


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])

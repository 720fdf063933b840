"""Let PyPI's torch, a CUDA build, be imported without the gigabytes of CUDA libraries that it names.

    python scripts/cuda_stubs.py SITE_PACKAGES

Each library that is named and not there gets a stand-in beside torch's own, with the functions that torch's libraries
miss. A stand-in says that there is no GPU. Nothing here is for torch on a GPU. Needs gcc and binutils.
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
"""Loaded when something is compiled for a GPU, not when torch is imported."""
NO_DEVICE = 100
"""cudaErrorNoDevice."""
RETURNS_STRING = re.compile(r"(String|Name|ncclGetLastError)$")
LAST_ERROR_CALL = re.compile(r"^cuda(GetLast|PeekAtLast)Error$")
"""Of an earlier call: none has failed."""


class SharedLibrary(NamedTuple):
    needed: list[str]
    """Libraries by their names."""
    version_sources: dict[str, str]
    """Which of these each version of a symbol comes from."""
    defined_symbols: set[str]
    undefined_symbols: list[tuple[str, str]]
    """Symbols with their versions, which may be empty."""


def main(site_packages: str) -> None:
    directory = Path(site_packages) / "torch" / "lib"
    paths = [path for path in sorted(directory.glob("*.so*")) if path.name not in LAZY_LIBRARIES]
    libraries = [read_library(path) for path in paths]
    named = {name for library in libraries for name in library.needed} - {path.name for path in paths}
    system = {name: library for name in named if (library := _load(name))}
    absent = named - set(system)
    for name, symbols in missing_symbols(libraries, absent, list(system.values())).items():
        build_stub(directory / name, symbols)
    print(f"{len(absent)} stand-ins for CUDA libraries in {directory}")


def read_library(path: Path) -> SharedLibrary:
    dynamic = _output("readelf", "--dynamic", "--wide", path)
    needs = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    versions: dict[str, str] = {}
    source = ""
    for file, version in re.findall(r" File: (\S+)| Name: (\S+) +Flags", _output("readelf", "-V", "--wide", path)):
        source = file or source
        if version:
            versions[version] = source
    has = {line.split()[-1].split("@")[0] for line in _symbols(path, "--defined-only")}
    misses = []
    for line in _symbols(path, "--undefined-only"):
        kind, symbol = line.split()[-2:]
        name, _, version = symbol.partition("@")
        if kind == "U":  # others are weak: they may be missing
            misses.append((name, version.lstrip("@")))
    return SharedLibrary(needs, versions, has, misses)


def missing_symbols(
    libraries: list[SharedLibrary], absent: set[str], system: list[ctypes.CDLL]
) -> dict[str, dict[str, set[str]]]:
    """Each absent library's symbols by version. One without a version goes to any library that is loaded with it,
    unless torch, Python or the system has it."""
    out: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in absent}
    defined = {name for library in libraries for name in library.defined_symbols}
    others = [ctypes.CDLL(None), *system]
    for library in libraries:
        near = [name for name in library.needed if name in absent]
        for name, version in library.undefined_symbols:
            if version:
                source = library.version_sources[version]
                if source in absent:
                    out[source][version].add(name)
            elif near and name not in defined and not any(hasattr(other, name) for other in others):
                out[near[0]][""].add(name)
    return out


def build_stub(path: Path, symbols: dict[str, set[str]]) -> None:
    names = sorted(name for some in symbols.values() for name in some)
    functions = "\n".join(f"{_return_type(name)} {name}(void) {{ return {_return_value(name)}; }}" for name in names)
    exported = "\n".join(
        f"{version} {{ global: {'; '.join(sorted(some))}; }};" for version, some in symbols.items() if version and some
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

"""A g++ that does not optimize: inductor's kernels compile much faster, and tests run them for milliseconds only."""

import shutil
from pathlib import Path

COMPILER = """#!/bin/sh
# g++ without optimization; fails for kernels while FAIL is set.
case "$FAIL $*" in yes*.main.cpp*) echo no kernels today >&2; exit 1;; esac
for argument in "$@"; do
    shift
    [ "$argument" = -O3 ] && argument=-O0
    set -- "$@" "$argument"
done
case "$*" in *.main.cpp*) ;; *) exec {real} "$@";; esac
# A kernel is a few lines after a header of torch that takes seconds. The first one precompiles it for the others; a
# compiler that cannot use it, for example because of other options, reads the header instead.
header=torch/csrc/inductor/cpp_prefix.h
headers={directory}/headers
if mkdir "$headers" 2>/dev/null; then
    (
        previous=
        for argument in "$@"; do
            shift
            case "$previous $argument" in *" -o" | "-o "* | *.cpp | *" -shared" | *" -l"* | *" -L"*) ;;
            *) set -- "$@" "$argument" ;;
            esac
            previous=$argument
        done
        mkdir -p "$(dirname "$headers/$header")"
        echo "#include <$header>" >"$headers/start.h"
        {real} -w -x c++-header "$@" "$headers/start.h" -o "$headers/part" && mv "$headers/part" "$headers/$header.gch"
    ) >/dev/null 2>&1
fi
exec {real} -I"$headers" "$@"
"""


def install_unoptimized_compiler(directory: Path) -> None:
    """Write `directory`/g++, to be put first on PATH."""
    path = directory / "g++"
    path.write_text(COMPILER.format(real=shutil.which("g++"), directory=directory))
    path.chmod(0o755)

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
exec {real} "$@"
"""


def install_unoptimized_compiler(directory: Path) -> None:
    """Write `directory`/g++, to be put first on PATH."""
    path = directory / "g++"
    path.write_text(COMPILER.format(real=shutil.which("g++")))
    path.chmod(0o755)

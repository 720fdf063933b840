"""Which line of code asked for the operator that runs now, without torch's own lines.

An operator of the backward pass has no line of its own: autograd numbers its nodes as it makes them, so the line at
which a node was made in the forward pass is remembered by that number.
"""

import os
from inspect import getfile
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

import trainyard
from trainyard import compat

PACKAGE = Path(trainyard.__file__).parent
TORCH = str(Path(getfile(torch)).parent)
ENGINE = str(Path("autograd", "graph.py"))
"""Of torch: what runs the backward pass. Frames further out are not an operator's own."""
PLUMBING = ("parallel", "kernels", "compat.py", "random.py")
"""Parts of the package that models call: a line there is told along with the line that called."""
NOWHERE = "torch's own code"


class Place(NamedTuple):
    at: str = NOWHERE
    """FILE:LINE that asked for it, or whose backward pass it is."""
    caller: str = NOWHERE
    """The model's line, where `at` is in something that models call."""
    backward: bool = False

    def __str__(self) -> str:
        return self.at if self.at == self.caller else f"{self.at} (from {self.caller})"


class Lines:
    def __init__(self) -> None:
        self.made: dict[int, tuple[str, str]] = {}
        """(at, caller) by number of autograd's node."""
        self.shown: dict[tuple[CodeType, int], str] = {}
        self.kinds: dict[CodeType, str] = {}

    def place(self, frame: FrameType | None) -> Place:
        """Of the operator that was asked for within this frame."""
        node = compat.running_node()
        at, caller = self._outside(frame)
        if node is None:
            self.made.setdefault(compat.newest_node(), (at, caller))
            return Place(at or NOWHERE, caller or NOWHERE)
        made_at, made_caller = self.made.get(node, (at, caller))
        return Place(at or made_at or NOWHERE, made_caller or caller or NOWHERE, True)

    def _outside(self, frame: FrameType | None) -> tuple[str, str]:
        """The innermost line outside of torch, and the innermost that is not plumbing either."""
        at = ""
        while frame is not None:
            kind = self.kinds.get(frame.f_code)
            if kind is None:
                kind = self.kinds[frame.f_code] = _kind(frame.f_code.co_filename)
            if kind == "engine":
                break
            if kind in ("plumbing", "code"):
                key = frame.f_code, frame.f_lineno
                line = self.shown.get(key)
                if line is None:
                    line = self.shown[key] = f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"
                at = at or line
                if kind == "code":
                    return at, line
            frame = frame.f_back
        return at, at


def _kind(file: str) -> str:
    path = Path(file)
    if file.startswith("<"):
        return "torch"  # code that it makes as it goes
    if file.startswith(TORCH):
        return "engine" if file.endswith(ENGINE) else "torch"
    if not path.is_relative_to(PACKAGE):
        return "code"
    part = path.relative_to(PACKAGE).parts[0]
    return "own" if part == "plan" else "plumbing" if part in PLUMBING else "code"


def _shown(file: str) -> str:
    path = Path(file)
    for root in (PACKAGE.parent, Path(os.getcwd())):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return file

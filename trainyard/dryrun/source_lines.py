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

PACKAGE_DIR = Path(trainyard.__file__).parent
TORCH_DIR = str(Path(getfile(torch)).parent)
AUTOGRAD_ENGINE_FILE = str(Path("autograd", "graph.py"))
"""Of torch: what runs the backward pass. Frames further out are not an operator's own."""
INFRASTRUCTURE = ("parallel", "kernels", "compat.py", "random.py")
"""Parts of the package that models call: a line there is told along with the line that called."""
TORCH_INTERNAL = "torch's own code"


class SourceLocation(NamedTuple):
    location: str = TORCH_INTERNAL
    """FILE:LINE that asked for it, or whose backward pass it is."""
    caller: str = TORCH_INTERNAL
    """The model's line, where `at` is in something that models call."""
    in_backward: bool = False

    def __str__(self) -> str:
        return self.location if self.location == self.caller else f"{self.location} (from {self.caller})"


class SourceLocator:
    def __init__(self) -> None:
        self.node_locations: dict[int, tuple[str, str]] = {}
        """(at, caller) by number of autograd's node."""
        self.line_texts: dict[tuple[CodeType, int], str] = {}
        self.file_kinds: dict[CodeType, str] = {}

    def locate(self, frame: FrameType | None) -> SourceLocation:
        """Of the operator that was asked for within this frame."""
        node = compat.current_backward_node_id()
        at, caller = self._user_lines(frame)
        if node is None:
            self.node_locations.setdefault(compat.last_forward_node_id(), (at, caller))
            return SourceLocation(at or TORCH_INTERNAL, caller or TORCH_INTERNAL)
        made_at, made_caller = self.node_locations.get(node, (at, caller))
        return SourceLocation(at or made_at or TORCH_INTERNAL, made_caller or caller or TORCH_INTERNAL, True)

    def _user_lines(self, frame: FrameType | None) -> tuple[str, str]:
        """The innermost line outside of torch, and the innermost that is not plumbing either."""
        at = ""
        while frame is not None:
            kind = self.file_kinds.get(frame.f_code)
            if kind is None:
                kind = self.file_kinds[frame.f_code] = _file_kind(frame.f_code.co_filename)
            if kind == "engine":
                break
            if kind in ("plumbing", "code"):
                key = frame.f_code, frame.f_lineno
                line = self.line_texts.get(key)
                if line is None:
                    line = self.line_texts[key] = f"{_display_path(frame.f_code.co_filename)}:{frame.f_lineno}"
                at = at or line
                if kind == "code":
                    return at, line
            frame = frame.f_back
        return at, at


def _file_kind(file: str) -> str:
    path = Path(file)
    if file.startswith("<"):
        return "torch"  # code that it makes as it goes
    if file.startswith(TORCH_DIR):
        return "engine" if file.endswith(AUTOGRAD_ENGINE_FILE) else "torch"
    if not path.is_relative_to(PACKAGE_DIR):
        return "code"
    part = path.relative_to(PACKAGE_DIR).parts[0]
    return "own" if part == "plan" else "plumbing" if part in INFRASTRUCTURE else "code"


def _display_path(file: str) -> str:
    path = Path(file)
    for root in (PACKAGE_DIR.parent, Path(os.getcwd())):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return file

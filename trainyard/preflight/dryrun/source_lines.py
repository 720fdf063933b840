"""The line of code that called the current operator, skipping torch's own lines.

An operator of the backward pass has no such line. Autograd numbers its nodes as it creates them, so the line that
created a node in the forward pass is remembered by the node's number.
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
"""The file of torch that runs the backward pass. Frames outside of it did not call the operator."""
INFRASTRUCTURE = ("compat", "core", "kernels", "parallel")
"""Packages that models call: a line there is reported together with the line that called it."""
TORCH_INTERNAL = "torch's own code"


class SourceLocation(NamedTuple):
    location: str = TORCH_INTERNAL
    """FILE:LINE that called the operator, or whose backward pass it belongs to."""
    caller: str = TORCH_INTERNAL
    """FILE:LINE of the model, if `location` is in a package that models call."""
    in_backward: bool = False

    def __str__(self) -> str:
        return self.location if self.location == self.caller else f"{self.location} (from {self.caller})"


class SourceLocator:
    """Finds the source line of operators."""

    def __init__(self) -> None:
        self.node_locations: dict[int, tuple[str, str]] = {}
        """(location, caller) by number of the autograd node."""
        self.line_texts: dict[tuple[CodeType, int], str] = {}
        self.file_kinds: dict[CodeType, str] = {}

    def locate(self, frame: FrameType | None) -> SourceLocation:
        """The source of the operator that was called in `frame`."""
        node = compat.current_backward_node_id()
        location, caller = self._user_lines(frame)
        if node is None:
            self.node_locations.setdefault(compat.last_forward_node_id(), (location, caller))
            return SourceLocation(location or TORCH_INTERNAL, caller or TORCH_INTERNAL)
        node_location, node_caller = self.node_locations.get(node, (location, caller))
        return SourceLocation(
            location or node_location or TORCH_INTERNAL, node_caller or caller or TORCH_INTERNAL, in_backward=True
        )

    def _user_lines(self, frame: FrameType | None) -> tuple[str, str]:
        """The innermost line outside of torch, and the innermost that is not infrastructure either."""
        location = ""
        while frame is not None:
            kind = self.file_kinds.get(frame.f_code)
            if kind is None:
                kind = self.file_kinds[frame.f_code] = _file_kind(frame.f_code.co_filename)
            if kind == "engine":
                break
            if kind in ("infrastructure", "code"):
                key = frame.f_code, frame.f_lineno
                line = self.line_texts.get(key)
                if line is None:
                    line = self.line_texts[key] = f"{_display_path(frame.f_code.co_filename)}:{frame.f_lineno}"
                location = location or line
                if kind == "code":
                    return location, line
            frame = frame.f_back
        return location, location


def _file_kind(file: str) -> str:
    path = Path(file)
    if file.startswith("<"):
        return "torch"  # code that torch generates
    if file.startswith(TORCH_DIR):
        return "engine" if file.endswith(AUTOGRAD_ENGINE_FILE) else "torch"
    if not path.is_relative_to(PACKAGE_DIR):
        return "code"
    package = path.relative_to(PACKAGE_DIR).parts[0]
    return "recorder" if package == "preflight" else "infrastructure" if package in INFRASTRUCTURE else "code"


def _display_path(file: str) -> str:
    path = Path(file)
    for root in (PACKAGE_DIR.parent, Path(os.getcwd())):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return file

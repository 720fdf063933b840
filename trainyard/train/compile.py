"""torch.compile as the configuration asks for it: small functions once, blocks one graph for all."""

import shutil
from collections.abc import Callable
from typing import Any

import torch

from trainyard.config.schema import CompileSection
from trainyard.errors import UserError

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def compiler(config: CompileSection) -> Compiler | None:
    """What to wrap a function with; None where compilation is off."""
    if not config.enabled:
        return None
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        raise UserError(
            "compile.enabled=true: no C++ compiler (g++) on this machine; install one, or compile.enabled=false"
        )

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, mode=config.mode, dynamic=False)

    return wrap

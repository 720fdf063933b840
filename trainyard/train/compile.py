"""torch.compile as the configuration asks for it: small functions once, blocks one graph for all."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from trainyard.config.schema import CompileSection
from trainyard.errors import UserError
from trainyard.models import Stack


class Compiler(Protocol):
    def __call__(self, function: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
        """The function, compiled when first called; `dynamic` where one graph should serve many shapes."""


def compiler(config: CompileSection) -> Compiler | None:
    """What to wrap a function with; None where compilation is off."""
    if not config.enabled:
        return None
    # torch's own place for what it has compiled is a temporary directory.
    kept = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "trainyard" / "inductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        raise UserError(
            "compile.enabled=true: no C++ compiler (g++) on this machine; install one, or compile.enabled=false"
        )

    def wrap(function: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
        return torch.compile(function, mode=config.mode, dynamic=dynamic)

    return wrap


def compile_model(model: Stack, mode: str, packs: bool, embed: bool) -> None:
    """Each block's forward (one graph serves all), and what is before the blocks where it pays to."""
    if embed:
        model.embed = torch.compile(model.embed, mode=mode)  # type: ignore[method-assign]
    for block in model.layers.children():
        # Packed micro batches differ in length: None makes a second graph for all lengths.
        dynamic = None if packs else False
        block.forward = torch.compile(block.forward, mode=mode, dynamic=dynamic, fullgraph=True)

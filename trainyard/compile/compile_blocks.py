"""torch.compile as the configuration asks for it: small functions once, blocks one graph for all."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from trainyard import compat
from trainyard.compile import inductor_cache
from trainyard.config.schema import CompileSection
from trainyard.devices import Compiling, Device
from trainyard.models import Stack
from trainyard.parallel.mesh import Mesh


class Compiler(Protocol):
    def __call__(self, function: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
        """The function, compiled when first called; `dynamic` where one graph should serve many shapes."""


def compiler(config: CompileSection, device: Device) -> Compiler | None:
    """What to wrap a function with; None where compilation is off, or no choice."""
    how = device.compiling()
    if not config.enabled or how is None:
        return None
    if how.backend == Compiling().backend:
        inductor_cache.ready(device)

    def wrap(function: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
        return torch.compile(function, **_asked(how, config.mode, dynamic, fullgraph=False))

    return wrap


def _asked(how: Compiling, mode: str, dynamic: bool | None, fullgraph: bool) -> dict[str, Any]:
    """Arguments of torch.compile."""
    if how.static:
        return {"backend": how.backend, "options": how.options, "dynamic": False, "fullgraph": True}
    return {"backend": how.backend, "mode": mode, "dynamic": dynamic, "fullgraph": fullgraph}


def compile_model(model: Stack, how: Compiling, mode: str, packs: bool, embed: bool) -> None:
    """Each block's forward (one graph serves all), and what is before the blocks where it pays to."""
    if packs:  # micro batches differ in length: one graph for all lengths
        compat.compile_for_any_length()
    if embed:
        model.embed = torch.compile(model.embed, **_asked(how, mode, packs, fullgraph=False))  # type: ignore[method-assign]
    for block in model.layers.children():
        block.forward = torch.compile(block.forward, **_asked(how, mode, packs, fullgraph=True))


class Graphs:
    """How many graphs were compiled and how many came from the cache, by torch's own counters."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.told: compat.CompileCounts | None = None

    def news(self) -> dict[str, Any]:
        """For a logged step: at the first all ranks' sums (all must ask), later what this rank has compiled since."""
        now, before = compat.compile_counts(), self.told
        self.told = now
        if before is not None:
            return {"graphs_compiled": more} if (more := now.compiled - before.compiled) else {}
        each = self.mesh.collect(tuple(now))
        compiled, cached, seconds = zip(*each, strict=True)
        return {"graphs_compiled": sum(compiled), "graphs_cached": sum(cached), "compile_seconds": max(seconds)}

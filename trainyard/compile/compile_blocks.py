"""torch.compile as the configuration asks for it: small functions once, blocks one graph for all."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from trainyard import compat
from trainyard.compile import inductor_cache
from trainyard.config.schema import CompileSection
from trainyard.devices import CompileOptions, Device
from trainyard.models import TransformerStage
from trainyard.parallel.mesh import Mesh


class CompileFn(Protocol):
    def __call__(self, function: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
        """The function, compiled when first called; `dynamic` where one graph should serve many shapes."""


def make_compile_fn(config: CompileSection, device: Device) -> CompileFn | None:
    """What to wrap a function with; None where compilation is off, or no choice."""
    how = device.compile_options()
    if not config.enabled or how is None:
        return None
    if how.backend == CompileOptions().backend:
        inductor_cache.prepare_cache(device)

    def wrap(function: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
        return torch.compile(function, **_compile_arguments(how, config.mode, dynamic, fullgraph=False))

    return wrap


def _compile_arguments(options: CompileOptions, mode: str, dynamic: bool | None, fullgraph: bool) -> dict[str, Any]:
    """Arguments of torch.compile."""
    if options.static_shapes:
        return {"backend": options.backend, "options": options.options, "dynamic": False, "fullgraph": True}
    return {"backend": options.backend, "mode": mode, "dynamic": dynamic, "fullgraph": fullgraph}


def compile_model(
    model: TransformerStage, options: CompileOptions, mode: str, padding_free: bool, compile_embedding: bool
) -> None:
    """Each block's forward (one graph serves all), and what is before the blocks where it pays to."""
    if padding_free:  # micro batches differ in length: one graph for all lengths
        compat.disable_automatic_dynamic_shapes()
    if compile_embedding:
        model.embed = torch.compile(model.embed, **_compile_arguments(options, mode, padding_free, fullgraph=False))  # type: ignore[method-assign]
    for block in model.layers.children():
        block.forward = torch.compile(block.forward, **_compile_arguments(options, mode, padding_free, fullgraph=True))


class CompileCounter:
    """How many graphs were compiled and how many came from the cache, by torch's own counters."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.last_counts: compat.CompileCounts | None = None

    def new_counts(self) -> dict[str, Any]:
        """For a logged step: at the first all ranks' sums (all must ask), later what this rank has compiled since."""
        now, before = compat.compile_counts(), self.last_counts
        self.last_counts = now
        if before is not None:
            return {"graphs_compiled": more} if (more := now.graphs_compiled - before.graphs_compiled) else {}
        each = self.mesh.all_gather_object(tuple(now))
        compiled, cached, seconds = zip(*each, strict=True)
        return {"graphs_compiled": sum(compiled), "graphs_cached": sum(cached), "compile_seconds": max(seconds)}

"""Apply torch.compile as configured: to small functions, and to blocks so that all of them share one graph."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from trainyard import compat
from trainyard.config.schema import CompileSection
from trainyard.devices.base import CompileOptions, Device
from trainyard.models import TransformerStage
from trainyard.parallel.mesh import Mesh
from trainyard.train.compile import inductor_cache


class CompileFn(Protocol):
    def __call__(self, function: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
        """Wrap a function to compile at its first call; `dynamic` if one graph should serve many shapes."""


def make_compile_fn(config: CompileSection, device: Device, local_rank: int = 0) -> CompileFn | None:
    """The wrapper for functions; None if compilation is off or the device compiles everything anyway."""
    options = device.compile_options()
    if not config.enabled or options is None:
        return None
    if options.backend == CompileOptions().backend:
        inductor_cache.prepare_cache(device, local_rank)

    def wrap(function: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
        return torch.compile(function, **_compile_arguments(options, config.mode, dynamic, fullgraph=False))

    return wrap


def _compile_arguments(options: CompileOptions, mode: str, dynamic: bool | None, fullgraph: bool) -> dict[str, Any]:
    """Arguments of torch.compile."""
    if options.static_shapes:
        return {"backend": options.backend, "options": options.options, "dynamic": False, "fullgraph": True}
    return {"backend": options.backend, "mode": mode, "dynamic": dynamic, "fullgraph": fullgraph}


def compile_model(
    model: TransformerStage, options: CompileOptions, mode: str, padding_free: bool, compile_embedding: bool
) -> None:
    """Compile the forward of each block (one graph serves all) and, with `compile_embedding`, the embedding."""
    compat.skip_rng_state_of_attention()
    if padding_free:  # micro batches differ in length, and one graph serves all lengths
        compat.disable_automatic_dynamic_shapes()
    if compile_embedding:
        model.embed = torch.compile(model.embed, **_compile_arguments(options, mode, padding_free, fullgraph=False))  # type: ignore[method-assign]
    for block in model.blocks:
        block.forward = torch.compile(block.forward, **_compile_arguments(options, mode, padding_free, fullgraph=True))


class CompileCounter:
    """Counts compiled graphs and cache hits with torch's own counters."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.last_counts: compat.CompileCounts | None = None

    def new_counts(self) -> dict[str, Any]:
        """Counts for a logged step: the first call, which all ranks must make, sums over ranks; later calls count this
        rank's new graphs."""
        counts, before = compat.compile_counts(), self.last_counts
        self.last_counts = counts
        if before is not None:
            return (
                {"graphs_compiled": new_graphs}
                if (new_graphs := counts.graphs_compiled - before.graphs_compiled)
                else {}
            )
        per_rank = self.mesh.all_gather_object(tuple(counts))
        compiled, cached, seconds = zip(*per_rank, strict=True)
        return {"graphs_compiled": sum(compiled), "graphs_cached": sum(cached), "compile_seconds": max(seconds)}

"""Activation recompute: drop activations after the forward pass and compute them again in the backward pass.

Dropout masks are a function of step and position, so that no random state has to be saved and restored.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainyard.config.schema import RecomputeSection


class Recomputable(nn.Module):
    """A module that `recompute.modules` can name, and what `apply_recompute` tells it."""

    recompute_name = ""
    """The name in `recompute.modules`."""
    keep_gathered = False
    """True inside a recomputed module: save the tokens gathered for a column-parallel matmul until backward, because
    the recompute has just gathered them (`TensorAxis.column_parallel`)."""


def apply_recompute(blocks: list[nn.Module], config: RecomputeSection, run: Callable[..., Any] = checkpoint) -> int:
    """Recompute the chosen modules of each block, in place, which keeps their names. Returns their number.
    `run` is torch's checkpoint, or a function with its arguments."""
    if config.kind == "none":
        return 0
    names: set[str] = {"core_attention"} if config.kind == "attention" else set(config.modules)
    wrapped = 0
    for block in blocks:
        chosen = [block] if config.kind == "full" else _outermost_matches(block, names)
        for module in chosen:
            for child in module.modules():
                if isinstance(child, Recomputable):
                    child.keep_gathered = True
            module.__class__ = _recomputed_class(type(module), run)  # type: ignore[arg-type]
        wrapped += len(chosen)
    return wrapped


@functools.cache
def _recomputed_class(cls: type[nn.Module], run: Callable[..., Any]) -> type[nn.Module]:
    """The class with a forward that is recomputed. The blocks of a model share it: code compiled for one block is
    guarded by its classes and serves all, while a forward of each instance would have to be compiled for each."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = super(recomputed, self).forward  # type: ignore[arg-type]
        return run(plain, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    recomputed = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    return recomputed


def _outermost_matches(module: nn.Module, names: set[str]) -> list[nn.Module]:
    """The modules below `module` with one of these names. A match inside another match is left out."""
    matches: list[nn.Module] = []
    for child in module.children():
        is_match = isinstance(child, Recomputable) and child.recompute_name in names
        matches += [child] if is_match else _outermost_matches(child, names)
    return matches

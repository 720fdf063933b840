"""Recompute: forget activations after the forward pass and make them again in the backward pass.

Dropout masks are a function of step and place, so nothing about random state has to be saved and replayed.
"""

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainyard.config.schema import RecomputeSection


def apply_recompute(blocks: list[nn.Module], config: RecomputeSection) -> int:
    """Wrap the chosen parts of each block in place (names stay). Returns how many modules were wrapped."""
    if config.kind == "none":
        return 0
    parts: set[str] = {"core_attention"} if config.kind == "attention" else set(config.modules)
    wrapped = 0
    for block in blocks:
        chosen = [block] if config.kind == "full" else _outermost_matches(block, parts)
        for module in chosen:
            for inside in module.modules():  # gathered once more anyway, when it is recomputed
                if hasattr(inside, "keep_gathered"):
                    inside.keep_gathered = True  # type: ignore[assignment]
            module.forward = functools.partial(
                checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
            )
        wrapped += len(chosen)
    return wrapped


def _outermost_matches(module: nn.Module, parts: set[str]) -> list[nn.Module]:
    """Modules below `module` that are one of `parts`; not looked for inside one that is wrapped already."""
    found: list[nn.Module] = []
    for child in module.children():
        found += [child] if getattr(child, "part", None) in parts else _outermost_matches(child, parts)
    return found

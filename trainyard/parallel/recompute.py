"""Activation recompute: drop activations after the forward pass and compute them again in the backward pass.

Attention, MLPs and blocks run again as a whole. Of norms and activation functions, the result is what takes memory: the
matmul that reads it would save it. Backward computes it again from what the norm or function itself saves.

Dropout masks are a function of step and position, so that no random state has to be saved and restored.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from trainyard.config.schema import RecomputeSection


class Recomputable(nn.Module):
    """A module that `recompute.modules` can name, and what `apply_recompute` tells it."""

    recompute_name = ""
    """The name in `recompute.modules`."""
    keep_gathered = False
    """True inside a recomputed module: save the tokens gathered for a column-parallel matmul until backward, because
    the recompute has just gathered them (`TensorAxis.column_parallel`)."""
    saves_inputs_only = False
    """True if the forward pass saves nothing but inputs and outputs, as those of fused kernels."""
    dropped: "DroppedOutputs | None" = None
    """Where `drop_output` notes results during a forward pass of the block; None: they are saved as usual."""

    def drop_output(self, output: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """The output itself. If recompute.modules names the module, operators that save it for backward save `compute`
        instead, which holds nothing but what the module saves anyway."""
        if self.dropped is not None:
            self.dropped.add(output, compute)
        return output


class DroppedOutputs:
    """Results of modules in one forward pass of a block that backward computes again."""

    def __init__(self) -> None:
        self.by_storage: dict[int, tuple[weakref.ref[Tensor], _Recomputed]] = {}

    def add(self, output: Tensor, compute: Callable[[], Tensor]) -> None:
        self.by_storage[id(output.untyped_storage())] = (weakref.ref(output), _Recomputed(compute))

    def pack(self, tensor: Tensor) -> Any:
        found = self.by_storage.get(id(tensor.untyped_storage()))
        if found is None:
            return tensor
        output, recomputed = found
        # Another tensor may have got the storage of one that is gone.
        if (known := output()) is None or tensor.numel() != known.numel():
            return tensor
        recomputed.uses += 1
        return recomputed, tensor.shape, tensor.stride()

    @staticmethod
    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        recomputed, shape, stride = saved
        tensor: Tensor = recomputed.take().as_strided(shape, stride)
        return tensor


class _Recomputed:
    """A result that several operators, such as the matmuls of q, k and v, may have saved: computed by the first of them
    and held until the last one."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute, self.uses = compute, 0
        self.value: Tensor | None = None

    def take(self) -> Tensor:
        value = self.value
        if value is None:
            with torch.no_grad():
                value = self.compute()
        self.uses -= 1
        self.value = value if self.uses > 0 else None
        return value


OUTPUT_NAMES = {"activation", "norm"}
"""Modules whose result is dropped."""


def apply_recompute(
    blocks: list[nn.Module],
    config: RecomputeSection,
    run: Callable[..., Any] = checkpoint,
    compiled: bool = False,
) -> int:
    """Recompute the chosen modules of each block, in place, which keeps their names. Returns their number.
    `run` is torch's checkpoint, or a function with its arguments. A compiler decides itself what a block saves: in a
    compiled one, results are not dropped, and norms and activation functions run again as a whole."""
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
            if compiled or not _drops_output(module) or not module.saves_inputs_only:
                module.__class__ = _recomputed_class(type(module), run)  # type: ignore[arg-type]
        dropping = tuple(module for module in chosen if not compiled and _drops_output(module))
        if dropping:
            vars(block)["dropping"] = dropping  # not children of the block
            block.__class__ = _dropping_class(type(block))  # type: ignore[arg-type]
        wrapped += len(chosen)
    return wrapped


def _drops_output(module: nn.Module) -> bool:
    return isinstance(module, Recomputable) and module.recompute_name in OUTPUT_NAMES


@functools.cache
def _dropping_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a block with a forward in which the results of some modules are not saved."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = super(dropping, self).forward  # type: ignore[arg-type]
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        dropped = DroppedOutputs()
        modules: Any = self.dropping
        try:
            for module in modules:
                module.dropped = dropped
            with saved_tensors_hooks(dropped.pack, dropped.unpack):
                return plain(*args, **kwargs)
        finally:
            for module in modules:
                module.dropped = None

    dropping = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    return dropping


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

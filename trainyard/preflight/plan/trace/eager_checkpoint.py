"""torch.utils.checkpoint for traces, without the two seconds that its import of torch's compiler takes."""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def eager_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As torch's with use_reentrant=False: the first tensor that backward needs has all of them computed again, each is
    freed when it has been used, and the recompute ends with the last one. The options of torch's are ignored."""
    del kwargs["use_reentrant"], kwargs["preserve_rng_state"]
    recompute = _Recompute(lambda: function(*args, **kwargs))
    with saved_tensors_hooks(recompute.pack, lambda saved: saved.take()):
        return function(*args, **kwargs)


class _SavedTensor:
    """Stands for a tensor that the forward pass would have saved."""

    def __init__(self, recompute: "_Recompute") -> None:
        self.recompute = recompute
        self.value: Tensor | None = None

    def take(self) -> Tensor:
        if self.value is None:
            self.recompute.run()
        value, self.value = self.value, None
        assert value is not None
        return value


class _Recompute:
    """The tensors that one call saves. It lives, and holds the inputs of the call, as long as any of them."""

    def __init__(self, forward: Callable[[], Any]) -> None:
        self.forward = forward
        self.saved: list[weakref.ref[_SavedTensor]] = []

    def pack(self, _: Tensor) -> _SavedTensor:
        saved = _SavedTensor(self)
        self.saved.append(weakref.ref(saved))
        return saved

    def run(self) -> None:
        waiting = iter(self.saved)
        left = len(self.saved)

        def pack_again(tensor: Tensor) -> Tensor:
            nonlocal left
            value, saved = tensor.detach(), next(waiting)()
            if saved is not None:
                saved.value = value
            left -= 1
            if not left:
                raise _AllRecomputedError
            return value

        hooks = saved_tensors_hooks(pack_again, lambda tensor: tensor)
        with suppress(_AllRecomputedError), torch.enable_grad(), hooks:
            self.forward()


class _AllRecomputedError(Exception):
    """Ends a recompute."""

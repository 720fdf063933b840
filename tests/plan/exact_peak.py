"""The peak of a rehearsed step, storage by storage: exact for torch's operations one by one, at any size, without
memory."""

import weakref
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainyard import compat
from trainyard.config.schema import Config
from trainyard.dryrun.dry_run import dry_run
from trainyard.parallel import attention_blocks, ring_attention

OPAQUE = {
    torch.ops.trainyard.context_attention.default: ring_attention.context_attention._init_fn,
    torch.ops.trainyard.context_attention_backward.default: ring_attention.context_attention_backward._init_fn,
}
FLASH = compat.ATTENTION_KERNELS[False, SDPBackend.FLASH_ATTENTION.value]


class Live(TorchDispatchMode):
    """Counts the bytes of storages from when they are first seen until they are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in OPAQUE:
            with self:
                return OPAQUE[function](*args, **(kwargs or {}))
        if function is torch.ops.aten._fused_adamw_.tensor_lr:  # in place
            return None
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1
        if function.namespace == "c10d":
            return FakeWork().boxed()
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return

        def gone(_: object) -> None:
            self.now -= size
            del self.seen[key]

        self.now += size
        self.seen[key] = weakref.ref(storage, gone)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **how: Any) -> Tensor:
    """The meta device takes attention apart; a CPU, a GPU and Trainium do not."""
    bias = None if mask is None else torch.zeros_like(mask, dtype=q.dtype)
    return FLASH.forward(q, k, v, how.get("is_causal", False), bias)[0]


def peak(config: Config, rank: int, ranks: int) -> int:
    """Of the second step."""
    live = Live()
    patches = (
        patch.object(F, "scaled_dot_product_attention", attention),
        patch.object(attention_blocks, "_kernel", lambda *_: FLASH),
    )
    with patches[0], patches[1], live, dry_run(config, rank, ranks) as trainer:
        for model in trainer.models:
            model.train()
        batch = trainer.loader.batch(0, trainer.batch_slice)
        for number in (1, 2):
            live.peak = 0
            trainer.train_step(batch, number, 1e-3)
            trainer.optimizer.wait_for_weights()
    return live.peak

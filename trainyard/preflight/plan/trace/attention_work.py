"""Core attention as one operator whose work is counted, whatever computes it on a device."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainyard.models.layers import CoreAttention
from trainyard.models.module_factory import ModuleFactory
from trainyard.parallel.ring_attention import CpMethod, attention_messages


class AttentionCall(NamedTuple):
    """One attention of a micro batch on one rank."""

    scores: int
    """Elements of the matrix of scores, over all keys of all context-parallel ranks."""
    head_size: int
    causal: bool
    nbytes: int
    """Queries, keys, values and output."""
    cp: int
    cp_method: CpMethod
    key_elements: int
    """Elements of this rank's keys."""
    document_elements: int
    dtype: torch.dtype

    def messages(self, backward: bool) -> Iterator[tuple[str, torch.dtype, int, int]]:
        """(kind, dtype, bytes, times)."""
        sizes = self.key_elements, self.document_elements
        return attention_messages(self.cp_method, self.cp, *sizes, self.dtype, backward)

    @property
    def flops(self) -> int:
        """Forward, if no score is masked."""
        return 4 * self.scores * self.head_size


OnAttention = Callable[[AttentionCall, bool], None]
"""Called with each attention, and with True in the backward pass."""


class AttentionFactory(ModuleFactory):
    """Builds models whose attention reports its work."""

    def __init__(self, on_attention: OnAttention, *args: Any) -> None:
        super().__init__(*args)
        self.on_attention = on_attention

    def core_attention(
        self, heads: int, kv_heads: int, causal: bool, dropout: float, site: str, window: int | None = None
    ) -> CoreAttention:
        sizes = (heads, kv_heads, causal, dropout, site, self.tp, self.cp, self.kernels, window)
        return CountedAttention(self.on_attention, *sizes)


class CountedAttention(CoreAttention):
    def __init__(self, on_attention: OnAttention, *args: Any) -> None:
        super().__init__(*args)
        self.on_attention = on_attention

    def forward(
        self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, documents_BT: Any = None, seeds: Any = None
    ) -> Tensor:
        B, H, T, K = q_BHTK.shape
        k_BGTK, v_BGTK = self.even_kv_heads(k_BGTK), self.even_kv_heads(v_BGTK)
        call = self._call((B, H, T, K), k_BGTK.numel(), documents_BT, q_BHTK.dtype)
        tensors = (q_BHTK, k_BGTK, v_BGTK)
        out: Tensor = _Attention.apply(self.on_attention, call, (B, T, H, K), *tensors)  # type: ignore[no-untyped-call]
        return out.transpose(1, 2)

    def forward_qkv(self, projections: tuple[Tensor, ...], head_size: int, documents_BT: Any, seeds: Any) -> Tensor:
        B, T = projections[0].shape[:2]
        width = sum(projection.shape[-1] for projection in projections) // 3
        call = self._call((B, width // head_size, T, head_size), B * T * width, documents_BT, projections[0].dtype)
        return _Attention.apply(self.on_attention, call, (B, T, width), *projections)  # type: ignore[no-untyped-call]

    def _call(
        self, shape_BHTK: tuple[int, int, int, int], keys: int, documents: Tensor | None, dtype: torch.dtype
    ) -> AttentionCall:
        B, H, T, K = shape_BHTK
        document_elements = 0 if documents is None else documents.numel()
        nbytes = (2 * B * H * T * K + 2 * keys) * dtype.itemsize
        return AttentionCall(
            B * H * T * T * self.cp.size, K, self.causal, nbytes, self.cp.size, self.cp.method, keys, document_elements,
            dtype,
        )  # fmt: skip


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, on_attention: OnAttention, call: AttentionCall, shape: Any, *tensors: Tensor) -> Tensor:
        on_attention(call, False)
        ctx.on_attention, ctx.call = on_attention, call
        out = tensors[0].new_empty(shape)
        ctx.save_for_backward(*tensors, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, _ = ctx.saved_tensors
        ctx.on_attention(ctx.call, True)
        return None, None, None, *(tensor.new_empty(tensor.shape) for tensor in tensors)

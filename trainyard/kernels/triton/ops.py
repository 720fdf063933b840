"""Triton kernels where compilers leave time on the table: each is one pass over memory, forward and backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.compat import add_matmul_
from trainyard.kernels.fp8_linear import Fp8Options
from trainyard.kernels.fp8_linear import fp8_linear as fp8_linear
from trainyard.kernels.reference import AttentionDropout, Kernels, RowDropout
from trainyard.kernels.triton import adamw, attention, cross_entropy, dropout, gelu, layer_norm, rms_norm
from trainyard.kernels.triton import rope as rotary
from trainyard.kernels.triton import swiglu as swiglu_kernels
from trainyard.kernels.triton.column_sums import add_column_sums_


class TritonKernels(Kernels):
    cross_entropy_ = staticmethod(cross_entropy.cross_entropy_)
    adamw_ = staticmethod(adamw.adamw_)
    adamw_stochastic_rounding_ = staticmethod(adamw.adamw_stochastic_rounding_)

    fused_wgrad = has_varlen_attention = has_fp8_matmul = True

    def varlen_attention(
        self,
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        cu_seqlens: Tensor,
        max_seqlen: int,
        causal: bool,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        return attention.varlen_attention(qkv, heads, kv_heads, cu_seqlens, max_seqlen, causal, dropout)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, fp8: Fp8Options | None = None) -> Tensor:
        if fp8:
            return fp8_linear(x, weight, bias, fp8)
        sinks = self._wgrad_buffers(weight)
        return _LinearFusedWgrad.apply(x, weight, bias, *sinks) if sinks else super().linear(x, weight, bias)  # type: ignore[no-untyped-call]

    def _wgrad_buffers(self, *parameters: Tensor | None) -> "WgradBuffers":
        """Of all parameters that there are, or none. A compiler wants gradients as tensors."""
        if not self.wgrad_buffers or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return ()
        found = [self.wgrad_buffers.get(parameter) for parameter in parameters if parameter is not None]
        return () if None in found else tuple(sink for sink in found if sink is not None)

    def add_rms_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        function = _RMSNorm if y is None else _AddRMSNorm
        return function.apply(*((x,) if y is None else (x, y)), weight, eps, self._wgrad_buffers(weight))  # type: ignore[no-untyped-call]

    def add_layer_norm(
        self,
        x: Tensor,
        y: Tensor | None,
        y_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        dropout: RowDropout | None,
        post_norm: bool = False,
    ) -> tuple[Tensor, Tensor]:
        sinks = self._wgrad_buffers(weight, bias, y_bias)
        return _AddLayerNorm.apply(x, y, y_bias, weight, bias, *_dropout_args(dropout), eps, post_norm, sinks)  # type: ignore[no-untyped-call]

    def add_dropout(self, x: Tensor | None, y: Tensor, bias: Tensor | None, dropout: RowDropout | None) -> Tensor:
        return _AddDropout.apply(x, y, bias, *_dropout_args(dropout), self._wgrad_buffers(bias))  # type: ignore[no-untyped-call]

    def bias_gelu(self, x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        return _BiasGELU.apply(x, bias, tanh, self._wgrad_buffers(bias))  # type: ignore[no-untyped-call]

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]

    def rope(self, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _Rope.apply(qkv, cos, sin, heads, kv_heads)  # type: ignore[no-untyped-call]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


WgradBuffers = tuple[Tensor, ...]


def _dropout_args(drops: RowDropout | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, float]:
    if drops is None or drops.p == 0:
        return None, None, None, 0.0
    return drops.seed0, drops.seed1, drops.site, drops.p


def _reduce_vector_grads(parts: Tensor, dtype: torch.dtype, sinks: WgradBuffers) -> list[Tensor | None]:
    """Gradients of vectors from parts [programs, k, columns]: k of them, or None where they went into sinks."""
    if not sinks:
        return list(parts.sum(0).to(dtype).unbind())
    add_column_sums_(parts, sinks)
    return [None] * parts.shape[1]


class _LinearFusedWgrad(torch.autograd.Function):
    """A product whose weight's gradient is added, by the product itself, to where gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink, ctx.biased = sink, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0].flatten(0, -2)
        dx = (dy @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        add_matmul_(ctx.sink, dy.t(), x.flatten(0, -2))
        return dx, None, dy.sum(0) if ctx.biased else None, None


class _RMSNorm(torch.autograd.Function):
    """Gives x too, so that backward adds the gradient of the residual in the same pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, sinks: WgradBuffers) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # where x goes nowhere else, nothing is added
        _, out, inverse = rms_norm.add_rms_norm(x, None, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.sinks = sinks
        return x.view_as(x), out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, parts = rms_norm.rms_norm_backward(grads[1], grads[0], *ctx.saved_tensors)
        return dx, *_reduce_vector_grads(parts, dx.dtype, ctx.sinks), None, None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weight: Tensor, eps: float, sinks: WgradBuffers
    ) -> tuple[Tensor, Tensor]:
        total, out, inverse = rms_norm.add_rms_norm(x, y, weight, eps)
        ctx.save_for_backward(total, weight, inverse)
        ctx.sinks = sinks
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, parts = rms_norm.rms_norm_backward(grads[1], grads[0], *ctx.saved_tensors)
        return dx, dx, *_reduce_vector_grads(parts, dx.dtype, ctx.sinks), None, None


class _AddLayerNorm(torch.autograd.Function):
    """Gives too what the block goes on with, as `_Norm` does: the sum or, `after` it, the norm once more."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        y_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        first: Tensor | None,
        second: Tensor | None,
        site: Tensor | None,
        p: float,
        eps: float,
        after: bool,
        sinks: WgradBuffers,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        total, out, *each = layer_norm.add_layer_norm(x, y, y_bias, weight, bias, first, second, site, p, eps)
        total = x.view_as(x) if y is None else total
        ctx.save_for_backward(total, *each, weight, first, second, site)
        ctx.p, ctx.added, ctx.biased, ctx.after, ctx.sinks = p, y is not None, y_bias is not None, after, sinks
        return out.view_as(out) if after else total, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        going_on, d_out = grads
        if d_out is None:  # nobody read the second of two equal ones
            going_on, d_out = d_out, going_on
        saved = ctx.saved_tensors  # once: under recomputation they are made for one reader
        weight, first = saved[3:5]
        dx, dy, parts = layer_norm.layer_norm_backward(d_out, going_on, *saved, ctx.p, ctx.biased, ctx.after)
        d_weight, d_bias, *rest = _reduce_vector_grads(parts, weight.dtype, ctx.sinks)
        dy = (dy if first is not None else dx) if ctx.added else None
        return dx, dy, rest[0] if rest else None, d_weight, d_bias, *[None] * 7


class _AddDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor | None,
        y: Tensor,
        bias: Tensor | None,
        first: Tensor | None,
        second: Tensor | None,
        site: Tensor | None,
        p: float,
        sinks: WgradBuffers,
    ) -> Tensor:
        ctx.save_for_backward(first, second, site)
        ctx.p, ctx.sinks, ctx.added, ctx.biased = p, sinks, x is not None, bias is not None
        return dropout.add_dropout(x, y, bias, first, second, site, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_out = grads[0]
        d_bias: Tensor | None = None
        dy = d_out
        if ctx.p or ctx.biased:
            dropped, parts = dropout.add_dropout_backward(d_out, *ctx.saved_tensors, ctx.p, ctx.biased)
            dy = dropped if ctx.p else d_out
            (d_bias,) = _reduce_vector_grads(parts, d_out.dtype, ctx.sinks) if ctx.biased else (None,)
        return d_out if ctx.added else None, dy, d_bias, *[None] * 5


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu_kernels.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return swiglu_kernels.swiglu_backward(grads[0], *ctx.saved_tensors)


class _BiasGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, tanh: bool, sinks: WgradBuffers) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.tanh, ctx.sinks = tanh, sinks
        return gelu.gelu(x, bias, tanh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, parts = gelu.gelu_backward(grads[0], x, bias, ctx.tanh)
        return dx, *_reduce_vector_grads(parts, bias.dtype, ctx.sinks), None, None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k = rotary.rope(qkv, cos, sin, heads, kv)
        return q, k, qkv.view(*qkv.shape[:2], -1, cos.shape[-1])[:, :, heads + kv :]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return rotary.rope_backward(*grads, *ctx.saved_tensors), None, None, None, None

"""Triton kernels where compilers leave time on the table: each is one pass over memory, forward and backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.compat import add_product_
from trainyard.kernels.fp8_linear import Fp8
from trainyard.kernels.fp8_linear import linear as fp8_linear
from trainyard.kernels.reference import Drops, Kernels, RowDrops
from trainyard.kernels.triton import adamw, attention, cross_entropy, dropout, gelu, layer_norm, rms_norm
from trainyard.kernels.triton import rope as rotary
from trainyard.kernels.triton import swiglu as swiglu_kernels
from trainyard.kernels.triton.column_sums import add_up_


class Fused(Kernels):
    cross_entropy_ = staticmethod(cross_entropy.cross_entropy_)
    adamw_ = staticmethod(adamw.adamw_)
    adamw_rounded_ = staticmethod(adamw.adamw_rounded_)

    fills_sinks = attends = multiplies_fp8 = True

    def attend(
        self, qkv: Tensor, heads: int, kv: int, starts: Tensor, longest: int, causal: bool, drops: Drops | None
    ) -> Tensor:
        return attention.attend(qkv, heads, kv, starts, longest, causal, drops)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, fp8: Fp8 | None = None) -> Tensor:
        if fp8:
            return fp8_linear(x, weight, bias, fp8)
        sinks = self._sinks(weight)
        return _Linear.apply(x, weight, bias, *sinks) if sinks else super().linear(x, weight, bias)  # type: ignore[no-untyped-call]

    def _sinks(self, *parameters: Tensor | None) -> "Sinks":
        """Of all parameters that there are, or none. A compiler wants gradients as tensors."""
        if not self.sinks or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return ()
        found = [self.sinks.get(parameter) for parameter in parameters if parameter is not None]
        return () if None in found else tuple(sink for sink in found if sink is not None)

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        function = _Norm if y is None else _AddNorm
        return function.apply(*((x,) if y is None else (x, y)), weight, eps, self._sinks(weight))  # type: ignore[no-untyped-call]

    def add_layer_norm(
        self,
        x: Tensor,
        y: Tensor | None,
        y_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        drops: RowDrops | None,
        after: bool = False,
    ) -> tuple[Tensor, Tensor]:
        sinks = self._sinks(weight, bias, y_bias)
        return _LayerNorm.apply(x, y, y_bias, weight, bias, *_words(drops), eps, after, sinks)  # type: ignore[no-untyped-call]

    def add_dropped(self, x: Tensor | None, y: Tensor, bias: Tensor | None, drops: RowDrops | None) -> Tensor:
        return _AddDropped.apply(x, y, bias, *_words(drops), self._sinks(bias))  # type: ignore[no-untyped-call]

    def gelu(self, x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        return _GELU.apply(x, bias, tanh, self._sinks(bias))  # type: ignore[no-untyped-call]

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]

    def rope(self, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _Rope.apply(qkv, cos, sin, heads, kv)  # type: ignore[no-untyped-call]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


Sinks = tuple[Tensor, ...]


def _words(drops: RowDrops | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, float]:
    if drops is None or drops.p == 0:
        return None, None, None, 0.0
    return drops.first, drops.second, drops.site, drops.p


def _finish(parts: Tensor, dtype: torch.dtype, sinks: Sinks) -> list[Tensor | None]:
    """Gradients of vectors from parts [programs, k, columns]: k of them, or None where they went into sinks."""
    if not sinks:
        return list(parts.sum(0).to(dtype).unbind())
    add_up_(parts, sinks)
    return [None] * parts.shape[1]


class _Linear(torch.autograd.Function):
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
        add_product_(ctx.sink, dy.t(), x.flatten(0, -2))
        return dx, None, dy.sum(0) if ctx.biased else None, None


class _Norm(torch.autograd.Function):
    """Gives x too, so that backward adds the gradient of the residual in the same pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, sinks: Sinks) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # where x goes nowhere else, nothing is added
        _, out, inverse = rms_norm.add_norm(x, None, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.sinks = sinks
        return x.view_as(x), out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, parts = rms_norm.norm_backward(grads[1], grads[0], *ctx.saved_tensors)
        return dx, *_finish(parts, dx.dtype, ctx.sinks), None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor, eps: float, sinks: Sinks) -> tuple[Tensor, Tensor]:
        total, out, inverse = rms_norm.add_norm(x, y, weight, eps)
        ctx.save_for_backward(total, weight, inverse)
        ctx.sinks = sinks
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, parts = rms_norm.norm_backward(grads[1], grads[0], *ctx.saved_tensors)
        return dx, dx, *_finish(parts, dx.dtype, ctx.sinks), None, None


class _LayerNorm(torch.autograd.Function):
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
        sinks: Sinks,
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
        d_weight, d_bias, *rest = _finish(parts, weight.dtype, ctx.sinks)
        dy = (dy if first is not None else dx) if ctx.added else None
        return dx, dy, rest[0] if rest else None, d_weight, d_bias, *[None] * 7


class _AddDropped(torch.autograd.Function):
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
        sinks: Sinks,
    ) -> Tensor:
        ctx.save_for_backward(first, second, site)
        ctx.p, ctx.sinks, ctx.added, ctx.biased = p, sinks, x is not None, bias is not None
        return dropout.add_dropped(x, y, bias, first, second, site, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_out = grads[0]
        d_bias: Tensor | None = None
        dy = d_out
        if ctx.p or ctx.biased:
            dropped, parts = dropout.add_dropped_backward(d_out, *ctx.saved_tensors, ctx.p, ctx.biased)
            dy = dropped if ctx.p else d_out
            (d_bias,) = _finish(parts, d_out.dtype, ctx.sinks) if ctx.biased else (None,)
        return d_out if ctx.added else None, dy, d_bias, *[None] * 5


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu_kernels.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return swiglu_kernels.swiglu_backward(grads[0], *ctx.saved_tensors)


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, tanh: bool, sinks: Sinks) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.tanh, ctx.sinks = tanh, sinks
        return gelu.gelu(x, bias, tanh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, parts = gelu.gelu_backward(grads[0], x, bias, ctx.tanh)
        return dx, *_finish(parts, bias.dtype, ctx.sinks), None, None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k = rotary.rope(qkv, cos, sin, heads, kv)
        return q, k, qkv.view(*qkv.shape[:2], -1, cos.shape[-1])[:, :, heads + kv :]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return rotary.rope_backward(*grads, *ctx.saved_tensors), None, None, None, None

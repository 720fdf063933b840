"""Triton kernels where compilers leave time on the table: each is one pass over memory, forward and backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.compat import add_product_
from trainyard.kernels import adamw, attention, gated, gelu, layer_norm, norm, softmax
from trainyard.kernels import rope as rotary
from trainyard.kernels.fp8 import Fp8
from trainyard.kernels.fp8 import linear as fp8_linear
from trainyard.kernels.plain import Drops, Kernels, RowDrops, Sink


class Fused(Kernels):
    cross_entropy_ = staticmethod(softmax.cross_entropy_)
    adamw_ = staticmethod(adamw.adamw_)
    adamw_rounded_ = staticmethod(adamw.adamw_rounded_)

    sums_products = attends = multiplies_fp8 = True

    def attend(
        self, qkv: Tensor, heads: int, kv: int, starts: Tensor, longest: int, causal: bool, drops: Drops | None
    ) -> Tensor:
        return attention.attend(qkv, heads, kv, starts, longest, causal, drops)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, fp8: Fp8 | None = None) -> Tensor:
        if fp8:
            return fp8_linear(x, weight, bias, fp8)
        sink = self.sinks.get(weight) if self.sinks and torch.is_grad_enabled() else None
        if sink is None:
            return super().linear(x, weight, bias)
        return _Linear.apply(x, weight, bias, sink)  # type: ignore[no-untyped-call]

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        function = _Norm if y is None else _AddNorm
        return function.apply(*((x,) if y is None else (x, y)), weight, eps)  # type: ignore[no-untyped-call]

    def add_layer_norm(
        self,
        x: Tensor,
        y: Tensor | None,
        y_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        drops: RowDrops | None,
    ) -> tuple[Tensor, Tensor]:
        p, *words = drops if drops is not None and drops.p > 0 else (0.0, None, None, None)
        return _LayerNorm.apply(x, y, y_bias, weight, bias, *words, p, eps)  # type: ignore[no-untyped-call]

    def gelu(self, x: Tensor, tanh: bool) -> Tensor:
        return _GELU.apply(x, tanh)  # type: ignore[no-untyped-call]

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]

    def rope(self, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _Rope.apply(qkv, cos, sin, heads, kv)  # type: ignore[no-untyped-call]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class _Linear(torch.autograd.Function):
    """A product whose weight's gradient is added, by the product itself, to where gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Sink) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink, ctx.biased = sink, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0].flatten(0, -2)
        dx = (dy @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        add_product_(ctx.sink.total, dy.t(), x.flatten(0, -2))
        if ctx.sink.arrived:
            ctx.sink.arrived()
        return dx, None, dy.sum(0) if ctx.biased else None, None


class _Norm(torch.autograd.Function):
    """Gives x too, so that backward adds the gradient of the residual in the same pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # where x goes nowhere else, nothing is added
        _, out, inverse = norm.add_norm(x, None, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return x.view_as(x), out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *norm.norm_backward(grads[1], grads[0], *ctx.saved_tensors), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, out, inverse = norm.add_norm(x, y, weight, eps)
        ctx.save_for_backward(total, weight, inverse)
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, d_weight = norm.norm_backward(grads[1], grads[0], *ctx.saved_tensors)
        return dx, dx, d_weight, None


class _LayerNorm(torch.autograd.Function):
    """Gives x too, as `_Norm` does."""

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
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        total, out, *each = layer_norm.add_layer_norm(x, y, y_bias, weight, bias, first, second, site, p, eps)
        total = x.view_as(x) if y is None else total
        ctx.save_for_backward(total, *each, weight, first, second, site)
        ctx.p, ctx.added, ctx.biased = p, y is not None, y_bias is not None
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.saved_tensors[3]
        dx, dy, sums = layer_norm.layer_norm_backward(grads[1], grads[0], *ctx.saved_tensors, ctx.p, ctx.biased)
        d_weight, d_bias, *rest = sums.to(weight.dtype).unbind()
        dy = (dy if ctx.saved_tensors[4] is not None else dx) if ctx.added else None
        return dx, dy, rest[0] if rest else None, d_weight, d_bias, None, None, None, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return gated.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return gated.swiglu_backward(grads[0], *ctx.saved_tensors)


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tanh: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        return gelu.gelu(x, tanh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return gelu.gelu_backward(grads[0], *ctx.saved_tensors, ctx.tanh), None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q, k = rotary.rope(qkv, cos, sin, heads, kv)
        return q, k, qkv.view(*qkv.shape[:2], -1, cos.shape[-1])[:, :, heads + kv :]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return rotary.rope_backward(*grads, *ctx.saved_tensors), None, None, None, None

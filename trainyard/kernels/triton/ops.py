"""`Kernels` implemented in Triton, for operations where compilers leave time on the table: one pass over memory
forward, one backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.compat import add_matmul_
from trainyard.core.counter_rng import DropoutRng
from trainyard.kernels.fp8_linear import Fp8Options, fp8_linear
from trainyard.kernels.fp32_linear import Fp32Linear
from trainyard.kernels.frozen_linear import FrozenMatrix, frozen_linear
from trainyard.kernels.reference import Kernels
from trainyard.kernels.triton import adamw, cross_entropy, dropout, gelu, latent, layer_norm, rms_norm, row_sums
from trainyard.kernels.triton import rope as rotary
from trainyard.kernels.triton import swiglu as swiglu_kernels
from trainyard.kernels.triton.attention import ops as attention
from trainyard.kernels.triton.column_sums import add_column_sums_


class TritonKernels(Kernels):
    """Fused kernels for NVIDIA GPUs, or for Triton's interpreter on a CPU."""

    cross_entropy_ = staticmethod(cross_entropy.cross_entropy_)
    adamw_ = staticmethod(adamw.adamw_)
    adamw_stochastic_rounding_ = staticmethod(adamw.adamw_stochastic_rounding_)
    varlen_attention = staticmethod(attention.varlen_attention)

    fused_wgrad = has_varlen_attention = has_fp8_matmul = True

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, fp8: Fp8Options | None = None) -> Tensor:
        if fp8:
            return fp8_linear(x, weight, bias, fp8)
        buffers = self._wgrad_buffers(weight)
        return _LinearFusedWgrad.apply(x, weight, bias, *buffers) if buffers else super().linear(x, weight, bias)  # type: ignore[no-untyped-call]

    def fp32_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
            return super().fp32_linear(x, weight, bias)
        y: Tensor = Fp32Linear.apply(x, weight)  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias.float()

    def frozen_linear(
        self, x: Tensor, weight: FrozenMatrix, bias: Tensor | None = None, fp8: Fp8Options | None = None
    ) -> Tensor:
        return frozen_linear(x, weight, bias, fp8)

    def embedding(self, index: Tensor, weight: Tensor) -> Tensor:
        buffers = self._wgrad_buffers(weight)
        return _EmbeddingFusedWgrad.apply(index, weight, *buffers) if buffers else super().embedding(index, weight)  # type: ignore[no-untyped-call]

    def _wgrad_buffers(self, *parameters: Tensor | None) -> "WgradBuffers":
        """The gradient buffers of all given parameters, or none. Compiled code needs gradients as tensors."""
        if not self.wgrad_buffers or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return ()
        given = [parameter for parameter in parameters if parameter is not None]
        buffers = tuple(self.wgrad_buffers[parameter] for parameter in given if parameter in self.wgrad_buffers)
        return buffers if len(buffers) == len(given) else ()

    def add_rms_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return _AddRMSNorm.apply(x, y, weight, eps, self._wgrad_buffers(weight))  # type: ignore[no-untyped-call]

    def add_layer_norm(
        self, x: Tensor, y: Tensor | None, y_bias: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
        dropout: DropoutRng | None, post_norm: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if bias is None:
            return super().add_layer_norm(x, y, y_bias, weight, bias, eps, dropout, post_norm)
        buffers = self._wgrad_buffers(weight, bias, y_bias)
        return _AddLayerNorm.apply(x, y, y_bias, weight, bias, *_dropout_args(dropout), eps, post_norm, buffers)  # type: ignore[no-untyped-call]

    def add_dropout(self, x: Tensor | None, y: Tensor, bias: Tensor | None, dropout: DropoutRng | None) -> Tensor:
        return _AddDropout.apply(x, y, bias, *_dropout_args(dropout), self._wgrad_buffers(bias))  # type: ignore[no-untyped-call]

    def bias_gelu(self, x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        return _BiasGELU.apply(x, bias, tanh, self._wgrad_buffers(bias))  # type: ignore[no-untyped-call]

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]

    def rope(
        self, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int, kv_heads: int, interleaved: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        if cos is None:
            return super().rope(qkv, cos, sin, heads, kv_heads)
        q, k, v = _Rope.apply(qkv, cos, sin, heads, kv_heads, interleaved)  # type: ignore[no-untyped-call]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def norm_rope(
        self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor | None, sin: Tensor | None,
        heads: int, kv_heads: int, interleaved: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if cos is None:
            return super().norm_rope(qkv, q_weight, k_weight, eps, cos, sin, heads, kv_heads)
        weights, buffers = (q_weight, k_weight), self._wgrad_buffers(q_weight, k_weight)
        q, k, v = _NormRope.apply(qkv, *weights, eps, cos, sin, heads, kv_heads, interleaved, buffers)  # type: ignore[no-untyped-call]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def rotate_end(self, x_BHTK: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        out: Tensor = latent.RotateEnd.apply(x_BHTK.transpose(1, 2), cos, sin, interleaved)  # type: ignore[no-untyped-call]
        return out.transpose(1, 2)

    def join_keys(self, expanded_BTHE: Tensor, shared_BTR: Tensor, value_size: int) -> tuple[Tensor, Tensor]:
        key, value = latent.JoinKeys.apply(expanded_BTHE, shared_BTR, value_size)  # type: ignore[no-untyped-call]
        return key.transpose(1, 2), value.transpose(1, 2)

    def sum_rows(self, x: Tensor, index: Tensor, weight: Tensor | None) -> Tensor:
        return row_sums.sum_rows(x, index, weight)

    def sum_rows_backward(self, dy: Tensor, x: Tensor, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return row_sums.sum_rows_backward(dy, x, index, weight)


WgradBuffers = tuple[Tensor, ...]


def _dropout_args(dropout_rng: DropoutRng | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, float]:
    if dropout_rng is None or dropout_rng.p == 0:
        return None, None, None, 0.0
    return dropout_rng.seed0, dropout_rng.seed1, dropout_rng.site, dropout_rng.p


def _reduce_vector_grads(partial_sums: Tensor, dtype: torch.dtype, buffers: WgradBuffers) -> list[Tensor | None]:
    """Sum partial sums [programs, k, columns] to k vector gradients. Returns None for each if they went to buffers."""
    if not buffers:
        return list(partial_sums.sum(0).to(dtype).unbind())
    add_column_sums_(partial_sums, buffers)
    return [None] * partial_sums.shape[1]


class _LinearFusedWgrad(torch.autograd.Function):
    """F.linear whose weight gradient accumulates into a buffer inside the matrix multiplication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.buffer, ctx.has_bias = buffer, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = grads[0].flatten(0, -2)
        dx = (dy @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        add_matmul_(ctx.buffer, dy.t(), x.flatten(0, -2))
        return dx, None, dy.sum(0) if ctx.has_bias else None, None


class _EmbeddingFusedWgrad(torch.autograd.Function):
    """F.embedding whose gradient is added to the rows of a buffer, without a gradient of the whole vocabulary."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.buffer = buffer
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        row_sums.add_rows_by_index_(ctx.buffer, ctx.saved_tensors[0].flatten(), grads[0].flatten(0, -2))
        return None, None, None


class _AddRMSNorm(torch.autograd.Function):
    """RMSNorm that also returns the residual, so that backward adds its gradient in the same pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, buffers: WgradBuffers
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # d_residual is None if the residual has no other use
        total, out, rstd = rms_norm.add_rms_norm(x, y, weight, eps)
        total = x.view_as(x) if y is None else total
        ctx.save_for_backward(total, weight, rstd)
        ctx.buffers, ctx.has_residual = buffers, y is not None
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: recomputation unpacks them for one reader only
        dx, partial_sums = rms_norm.rms_norm_backward(grads[1], grads[0], *saved)
        d_weight = _reduce_vector_grads(partial_sums, saved[1].dtype, ctx.buffers)
        return dx, dx if ctx.has_residual else None, *d_weight, None, None


class _AddLayerNorm(torch.autograd.Function):
    """LayerNorm that also returns the residual, as `_AddRMSNorm` does: the sum or, with `post_norm`, the norm again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, y_bias: Tensor | None, weight: Tensor, bias: Tensor,
        seed0: Tensor | None, seed1: Tensor | None, site: Tensor | None, p: float, eps: float, post_norm: bool,
        buffers: WgradBuffers,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        total, out, *row_stats = layer_norm.add_layer_norm(x, y, y_bias, weight, bias, seed0, seed1, site, p, eps)
        total = x.view_as(x) if y is None else total
        ctx.save_for_backward(total, *row_stats, weight, seed0, seed1, site)
        ctx.p, ctx.post_norm, ctx.buffers = p, post_norm, buffers
        ctx.has_residual, ctx.has_bias = y is not None, y_bias is not None
        return out.view_as(out) if post_norm else total, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_residual, d_out = grads
        if d_out is None:  # only one of the two equal outputs was used
            d_residual, d_out = d_out, d_residual
        saved = ctx.saved_tensors  # read once: recomputation unpacks them for one reader only
        weight, seed0 = saved[3:5]
        dx, dy, partial_sums = layer_norm.layer_norm_backward(
            d_out, d_residual, *saved, ctx.p, ctx.has_bias, ctx.post_norm
        )
        d_weight, d_bias, *rest = _reduce_vector_grads(partial_sums, weight.dtype, ctx.buffers)
        dy = (dy if seed0 is not None else dx) if ctx.has_residual else None
        return dx, dy, rest[0] if rest else None, d_weight, d_bias, *[None] * 7


class _AddDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor | None, y: Tensor, bias: Tensor | None,
        seed0: Tensor | None, seed1: Tensor | None, site: Tensor | None, p: float, buffers: WgradBuffers,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(seed0, seed1, site)
        ctx.p, ctx.buffers, ctx.has_residual, ctx.has_bias = p, buffers, x is not None, bias is not None
        return dropout.add_dropout(x, y, bias, seed0, seed1, site, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = d_out = grads[0]
        d_bias: Tensor | None = None
        if ctx.p or ctx.has_bias:
            dropped, partial_sums = dropout.add_dropout_backward(d_out, *ctx.saved_tensors, ctx.p, ctx.has_bias)
            dy = dropped if ctx.p else d_out
            (d_bias,) = _reduce_vector_grads(partial_sums, d_out.dtype, ctx.buffers) if ctx.has_bias else (None,)
        return d_out if ctx.has_residual else None, dy, d_bias, *[None] * 5


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
    def forward(ctx: Any, x: Tensor, bias: Tensor, tanh: bool, buffers: WgradBuffers) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.tanh, ctx.buffers = tanh, buffers
        return gelu.gelu(x, bias, tanh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, partial_sums = gelu.gelu_backward(grads[0], x, bias, ctx.tanh)
        return dx, *_reduce_vector_grads(partial_sums, bias.dtype, ctx.buffers), None, None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, interleaved: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        q, k = rotary.rope(qkv, cos, sin, heads, kv_heads, interleaved)
        return q, k, qkv.view(*qkv.shape[:2], heads + 2 * kv_heads, -1)[:, :, heads + kv_heads :]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return rotary.rope_backward(*grads, *ctx.saved_tensors, ctx.interleaved), *[None] * 5


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, heads: int,
        kv_heads: int, interleaved: bool, buffers: WgradBuffers,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        ctx.eps, ctx.interleaved, ctx.buffers = eps, interleaved, buffers
        q, k = rotary.norm_rope(qkv, q_weight, k_weight, eps, cos, sin, heads, kv_heads, interleaved)
        return q, k, qkv.view(*qkv.shape[:2], heads + 2 * kv_heads, -1)[:, :, heads + kv_heads :]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        arguments = (qkv, q_weight, k_weight, ctx.eps, cos, sin, ctx.interleaved)
        d_qkv, partial_sums = rotary.norm_rope_backward(*grads, *arguments)
        return d_qkv, *_reduce_vector_grads(partial_sums, q_weight.dtype, ctx.buffers), *[None] * 7

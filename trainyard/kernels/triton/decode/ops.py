"""`Kernels` for decoding: steps of few rows, whose time goes to reading weights and cache and to launches."""

import torch
from torch import Tensor

from trainyard.core.counter_rng import DropoutRng
from trainyard.kernels.fp8_linear import Fp8Options
from trainyard.kernels.reference import PLAIN_SCORES, AttentionScores, Kernels
from trainyard.kernels.triton.decode import decode_attention as attention
from trainyard.kernels.triton.decode import greedy_tokens, rope_angles
from trainyard.kernels.triton.decode.deferred_ops import PendingLinear, PendingNorm, PendingRope, value_of
from trainyard.kernels.triton.decode.skinny_linear import MAX_ROWS
from trainyard.kernels.triton.ops import TritonKernels


class DecodeKernels(TritonKernels):
    """Kernels for a step of at most MAX_ROWS tokens without gradients. Larger inputs get those of `TritonKernels`.

    A Llama block takes five kernels: qkv with the norm before it, attention with RoPE and the cache write, the output
    projection with the residual sum, gate and up with norm and SwiGLU, and down with the residual sum.
    """

    has_decode_attention = True

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, fp8: Fp8Options | None = None) -> Tensor:
        if fp8 or not _is_decode_step(x) or not weight.is_contiguous():
            return super().linear(value_of(x), weight, bias, fp8)
        return PendingLinear.of(x, weight, bias)

    def fp32_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super().fp32_linear(value_of(x), weight, bias)

    def add_rms_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not _is_decode_step(x):
            return super().add_rms_norm(x, y, weight, eps)
        total = x if y is None else x + y
        if isinstance(total, PendingLinear):
            return total.compute_with_norm(weight, eps)
        return value_of(total), PendingNorm(value_of(total), weight, eps)

    def add_layer_norm(
        self, x: Tensor, y: Tensor | None, y_bias: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
        dropout: DropoutRng | None, post_norm: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if dropout is None and y is not None:
            x, y, y_bias = self.add_dropout(x, y, y_bias, None), None, None
        return super().add_layer_norm(value_of(x), value_of(y), y_bias, weight, bias, eps, dropout, post_norm)

    def add_dropout(self, x: Tensor | None, y: Tensor, bias: Tensor | None, dropout: DropoutRng | None) -> Tensor:
        if x is not None and dropout is None and isinstance(y, PendingLinear) and y.can_add(x):
            return y.add_residual(x, bias)
        return super().add_dropout(value_of(x), value_of(y), bias, dropout)

    def bias_gelu(self, x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        if isinstance(x, PendingLinear) and x.is_plain:
            return x.compute("gelu_tanh" if tanh else "gelu", bias)
        return super().bias_gelu(value_of(x), bias, tanh)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        if isinstance(gate_up, PendingLinear) and gate_up.is_plain:
            return gate_up.compute("swiglu")
        return super().swiglu(value_of(gate_up))

    def rope_angles(self, position: Tensor, frequency: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        if position.numel() > MAX_ROWS or torch.is_grad_enabled() or frequency.dim() > 1:
            return super().rope_angles(position, frequency, factor)
        return rope_angles.rope_angles(position, frequency, factor)

    def rope(
        self, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, heads: int, kv_heads: int, interleaved: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = value_of(qkv)
        x_BHTK = qkv.view(*qkv.shape[:2], heads + 2 * kv_heads, -1).transpose(1, 2)
        is_one_token = _is_decode_step(qkv) and qkv.shape[1] == 1
        if cos is None or sin is None or interleaved or cos.shape[-1] < x_BHTK.shape[-1] or not is_one_token:
            return super().rope(qkv, cos, sin, heads, kv_heads, interleaved)  # attention rotates halves of heads only
        q, k = PendingRope(x_BHTK[:, :heads], cos, sin), PendingRope(x_BHTK[:, heads:-kv_heads], cos, sin)
        return q, k, x_BHTK[:, -kv_heads:]

    def norm_rope(
        self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor | None, sin: Tensor | None,
        heads: int, kv_heads: int, interleaved: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        qkv = value_of(qkv)
        norm_rope = Kernels.norm_rope if _is_decode_step(qkv) and qkv.shape[1] == 1 else TritonKernels.norm_rope
        return norm_rope(self, qkv, q_weight, k_weight, eps, cos, sin, heads, kv_heads, interleaved)

    def decode_attention(
        self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor,
        visible: int = 0, window: int | None = None, scores: AttentionScores = PLAIN_SCORES,
    ) -> Tensor:  # fmt: skip
        cos = sin = None
        if isinstance(q_BHTK, PendingRope) and isinstance(k_BGTK, PendingRope):
            cos, sin = q_BHTK.rope_cos, q_BHTK.rope_sin
            q_BHTK, k_BGTK = q_BHTK.unrotated, k_BGTK.unrotated
        inputs = (value_of(q_BHTK), value_of(k_BGTK), value_of(v_BGTV), k_cache, v_cache, lengths)
        return attention.decode_attention(*inputs, cos, sin, window, scores)

    def greedy_tokens(self, logits: Tensor) -> Tensor:
        return greedy_tokens.greedy_tokens(value_of(logits))


def _is_decode_step(x: Tensor) -> bool:
    return x.numel() // x.shape[-1] <= MAX_ROWS and not torch.is_grad_enabled()

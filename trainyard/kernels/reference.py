"""What models ask for besides matrix products, in plain torch: right on any device, easy for a compiler to fuse, and
what the fused kernels are tested against."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.core.counter_rng import element_bits
from trainyard.kernels.fp8_linear import Fp8Options, fp8_linear_reference


class RowDropout(NamedTuple):
    """Dropout of activations, as `random.cell32` draws it."""

    p: float
    seed0: Tensor
    """With `second` the random words (int32) of each row."""
    seed1: Tensor
    site: Tensor


class AttentionDropout(NamedTuple):
    """Dropout of attention weights after softmax, as `models.layers.CoreAttention` draws it."""

    p: float
    seed0: Tensor
    """With `second` the random words (int32) of the queries' rows, [N]."""
    seed1: Tensor
    site: Tensor
    head_offset: Tensor
    """Global number of the first head that is here."""


class Kernels:
    """A device hands these out; those with kernels of their own override them."""

    fused_wgrad = False
    """Whether gradients of parameters that have a sink go there."""
    has_fp8_matmul = False
    """Whether fp8 products are the device's own."""
    has_varlen_attention = False
    """Whether there is `attend`."""
    has_fp32_gqa = True
    """Whether torch's attention has a kernel for fp32 with fewer kv heads than heads. Without one it would keep the
    scores: each query head is given a copy."""

    cross_entropy_: Callable[[Tensor, Tensor, int], Tensor] | None = None
    """(logits, labels, label that counts nowhere): each row's loss; the logits become its gradient.
    train/cross_entropy.py
    has the same in plain torch."""
    adamw_: Callable[..., None] | None = None
    """One update of flat fp32 memory (train/optim/update_rules.py), given scalars as one tensor."""
    adamw_stochastic_rounding_: Callable[..., None] | None = None
    """The same on bf16 weights, rounded at random."""

    def __init__(self) -> None:
        self.wgrad_buffers: dict[Tensor, Tensor] = {}
        """By parameter: where its gradient is summed, without a tensor of its own in between. Autograd is told of no
        gradient then, and runs the parameter's hooks all the same."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, fp8: Fp8Options | None = None) -> Tensor:
        return fp8_linear_reference(x, weight, bias, fp8) if fp8 else F.linear(x, weight, bias)

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
        """Attention, [N, (H + 2 G) K] to [N, H, K], within sequences that lie one after the other: sequence s from
        `starts[s]` to `starts[s + 1]`, at most `longest` tokens. Zeros after the last."""
        raise NotImplementedError  # where `attends` is false, nothing is packed

    def add_rms_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + y (x where y is None), and its RMS norm."""
        x = x if y is None else x + y
        return x, F.rms_norm(x, weight.shape, weight, eps)

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
        """x + dropout(y + y_bias) (x where y is None), and its LayerNorm; `after`, its LayerNorm twice."""
        x = x if y is None else self.add_dropout(x, y, y_bias, dropout)
        out = F.layer_norm(x, weight.shape, weight, bias, eps)
        return out if post_norm else x, out

    def add_dropout(self, x: Tensor | None, y: Tensor, bias: Tensor | None, dropout: RowDropout | None) -> Tensor:
        """x + dropout(y + bias), of what there is."""
        y = y if bias is None else y + bias
        y = y if dropout is None else row_dropout(y, dropout)
        return y if x is None else x + y

    def bias_gelu(self, x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        """Of x + bias."""
        return F.gelu(x + bias, approximate="tanh" if tanh else "none")

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up on the two halves of each row."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def rope(self, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, (H + 2 G) K] to q [B, H, T, K], k and v [B, G, T, K]; q and k rotated."""
        size = cos.shape[-1]
        flat = torch.split(qkv, [heads * size, kv_heads * size, kv_heads * size], -1)
        q, k, v = (y.view(*y.shape[:2], -1, size).transpose(1, 2) for y in flat)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def row_dropout(x: Tensor, dropout: RowDropout) -> Tensor:
    """Zero each element of [..., D] with the probability asked for; words are [...]."""
    column = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
    return counter_dropout(x, dropout.p, (dropout.seed0[..., None], dropout.seed1[..., None]), dropout.site, column)


def counter_dropout(x: Tensor, p: float, seeds: tuple[Tensor, Tensor], site: Tensor, column: Tensor) -> Tensor:
    """Zero each element with probability p. Words and column, broadcast to x's shape, say which element it is."""
    bits = element_bits(seeds, site, column) & 0x7FFFFFFF
    return torch.where(bits >= round(p * 2**31), x / (1 - p), 0.0)


def apply_rope(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotary positions on halves (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), in fp32. Where samples have positions
    of their own, cos and sin are [B, 1, T, K]."""
    x = x_BHTK.float()
    x1, x2 = x.chunk(2, -1)
    return (x * cos_TK + torch.cat((-x2, x1), -1) * sin_TK).to(x_BHTK.dtype)

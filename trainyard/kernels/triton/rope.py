"""Rotary embedding on the output of a fused QKV projection, also after an RMSNorm of each head of q and k.

Forward writes rotated queries and keys to new tensors (values stay in place); backward merges three gradients into one.
Cosines and sines are [T, K] or [B, 1, T, K], with equal halves.
"""

import torch
from torch import Tensor

from trainyard.compat import has_memory
from trainyard.kernels.custom_op import PARTIAL_SUM_OPS, kernel_op
from trainyard.kernels.reference import split_qkv
from trainyard.kernels.triton.column_sums import split_rows
from trainyard.kernels.triton.language import tl, triton


@triton.jit
def _load_heads(source, token, stride, heads, HALF, BLOCK_H, BLOCK_K):  # type: ignore[no-untyped-def]
    """Both halves of all heads of a token, fp32."""
    head = tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK_K)[None, :]
    mask = (head < heads) & (column < HALF)
    at = source + token * stride + head * 2 * HALF + column
    return tl.load(at, mask, 0.0).to(tl.float32), tl.load(at + HALF, mask, 0.0).to(tl.float32)


@triton.jit
def _store_heads(target, token, stride, heads, x1, x2, HALF, BLOCK_H, BLOCK_K):  # type: ignore[no-untyped-def]
    head = tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK_K)[None, :]
    mask = (head < heads) & (column < HALF)
    at = target + token * stride + head * 2 * HALF + column
    tl.store(at, x1.to(target.dtype.element_ty), mask)
    tl.store(at + HALF, x2.to(target.dtype.element_ty), mask)


@triton.jit
def _load_row(source, HALF, BLOCK_K):  # type: ignore[no-untyped-def]
    """Both halves of a vector, fp32 [1, BLOCK_K]."""
    column = tl.arange(0, BLOCK_K)[None, :]
    mask = column < HALF
    return (
        tl.load(source + column, mask, 0.0).to(tl.float32),
        tl.load(source + HALF + column, mask, 0.0).to(tl.float32),
    )


@triton.jit
def _rotate(source, target, token, source_stride, target_stride, c, s, heads, HALF, BLOCK_H, BLOCK_K):  # type: ignore[no-untyped-def]
    x1, x2 = _load_heads(source, token, source_stride, heads, HALF, BLOCK_H, BLOCK_K)
    _store_heads(target, token, target_stride, heads, x1 * c - x2 * s, x2 * c + x1 * s, HALF, BLOCK_H, BLOCK_K)


@triton.jit
def _rope_kernel(  # type: ignore[no-untyped-def]
    q, k, v, q_target, k_target, v_target, cos, sin, angles, heads, kv_heads,
    q_source_stride, k_source_stride, v_source_stride, q_target_stride, k_target_stride, v_target_stride,
    HALF: tl.constexpr, BACKWARD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    angle = token % angles * 2 * HALF
    c, _ = _load_row(cos + angle, HALF, BLOCK_K)
    s, _ = _load_row(sin + angle, HALF, BLOCK_K)
    s = -s if BACKWARD else s
    _rotate(q, q_target, token, q_source_stride, q_target_stride, c, s, heads, HALF, BLOCK_H, BLOCK_K)
    _rotate(k, k_target, token, k_source_stride, k_target_stride, c, s, kv_heads, HALF, BLOCK_G, BLOCK_K)
    if BACKWARD:
        offset = tl.arange(0, BLOCK_G * BLOCK_K * 2)
        mask = offset < kv_heads * 2 * HALF
        tl.store(
            v_target + token * v_target_stride + offset, tl.load(v + token * v_source_stride + offset, mask, 0.0), mask
        )


def _head_blocks(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "HALF": head_dim // 2,
        "BLOCK_H": triton.next_power_of_2(heads),
        "BLOCK_G": triton.next_power_of_2(kv_heads),
        "BLOCK_K": triton.next_power_of_2(head_dim // 2),
        "num_warps": 4 if heads * head_dim <= 2048 else 8,
    }


def _launch(sources: tuple[Tensor, ...], targets: tuple[Tensor, ...], cos: Tensor, sin: Tensor, backward: bool) -> None:
    """Sources and targets are q, k and v, [tokens, heads, head dim], each with its own stride between tokens."""
    heads, kv_heads, head_dim = sources[0].shape[1], sources[1].shape[1], cos.shape[-1]
    _rope_kernel[(sources[0].shape[0],)](
        *sources, *targets, cos.contiguous(), sin.contiguous(), cos.numel() // head_dim, heads, kv_heads,
        *(x.stride(0) for x in (*sources, *targets)), BACKWARD=backward, **_head_blocks(heads, kv_heads, head_dim),
    )  # fmt: skip


@kernel_op
def rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """[B, T, (H + 2 G) K] to q [B, T, H, K] and k [B, T, G, K]."""
    q, k = (qkv.new_empty(*qkv.shape[:2], count, cos.shape[-1]) for count in (heads, kv_heads))
    if has_memory(q):
        sources = split_qkv(qkv.contiguous().flatten(0, 1), heads, kv_heads)
        targets = q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1)
        _launch(sources, targets, cos, sin, backward=False)
    return q, k


@kernel_op
def rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Merge the gradients of q [B, T, H, K], k and v [B, T, G, K] into that of qkv."""
    batch, tokens, heads, head_dim = dq.shape
    kv_heads = dk.shape[2]
    d_qkv = dq.new_empty(batch, tokens, (heads + 2 * kv_heads) * head_dim)
    if has_memory(d_qkv):
        sources = tuple(x.contiguous().flatten(0, 1) for x in (dq, dk, dv))
        _launch(sources, split_qkv(d_qkv.flatten(0, 1), heads, kv_heads), cos, sin, backward=True)
    return d_qkv


@triton.jit
def _norm_and_rotate(  # type: ignore[no-untyped-def]
    source, target, weight, token, source_stride, target_stride, c, s, eps, heads, HALF, BLOCK_H, BLOCK_K
):
    x1, x2 = _load_heads(source, token, source_stride, heads, HALF, BLOCK_H, BLOCK_K)
    w1, w2 = _load_row(weight, HALF, BLOCK_K)
    r = 1 / tl.sqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF) + eps)[:, None]
    n1, n2 = x1 * r * w1, x2 * r * w2
    _store_heads(target, token, target_stride, heads, n1 * c - n2 * s, n2 * c + n1 * s, HALF, BLOCK_H, BLOCK_K)


@triton.jit
def _norm_rope_forward(  # type: ignore[no-untyped-def]
    q, k, q_target, k_target, q_weight, k_weight, cos, sin, angles, eps, heads, kv_heads, stride,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    angle = token % angles * 2 * HALF
    c, _ = _load_row(cos + angle, HALF, BLOCK_K)
    s, _ = _load_row(sin + angle, HALF, BLOCK_K)
    width = 2 * HALF
    _norm_and_rotate(
        q, q_target, q_weight, token, stride, heads * width, c, s, eps, heads, HALF, BLOCK_H, BLOCK_K
    )  # fmt: skip
    _norm_and_rotate(
        k, k_target, k_weight, token, stride, kv_heads * width, c, s, eps, kv_heads, HALF, BLOCK_G, BLOCK_K
    )  # fmt: skip


@triton.jit
def _rotate_and_norm_backward(  # type: ignore[no-untyped-def]
    d_out, x, dx, weight, token, d_out_stride, stride, c, s, eps, heads, HALF, BLOCK_H, BLOCK_K
):
    """Store the gradient of x; return the two halves of the weight's for this token."""
    g1, g2 = _load_heads(d_out, token, d_out_stride, heads, HALF, BLOCK_H, BLOCK_K)
    g1, g2 = g1 * c + g2 * s, g2 * c - g1 * s
    x1, x2 = _load_heads(x, token, stride, heads, HALF, BLOCK_H, BLOCK_K)
    r = 1 / tl.sqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF) + eps)[:, None]
    n1, n2 = x1 * r, x2 * r
    dw1, dw2 = tl.sum(g1 * n1, 0), tl.sum(g2 * n2, 0)
    w1, w2 = _load_row(weight, HALF, BLOCK_K)
    g1, g2 = g1 * w1, g2 * w2
    mean = (tl.sum(g1 * n1 + g2 * n2, 1) / (2 * HALF))[:, None]
    _store_heads(dx, token, stride, heads, (g1 - n1 * mean) * r, (g2 - n2 * mean) * r, HALF, BLOCK_H, BLOCK_K)
    return dw1, dw2


@triton.jit
def _norm_rope_backward(  # type: ignore[no-untyped-def]
    dq, dk, dv, qkv, d_qkv, q_weight, k_weight, cos, sin, partial_sums, angles, eps, tokens, tokens_per_program,
    heads, kv_heads, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    width = 2 * HALF
    stride = (heads + 2 * kv_heads) * width
    k_start, v_start = heads * width, (heads + kv_heads) * width
    q_sum1, q_sum2, k_sum1, k_sum2 = (
        tl.zeros((BLOCK_K,), tl.float32), tl.zeros((BLOCK_K,), tl.float32),
        tl.zeros((BLOCK_K,), tl.float32), tl.zeros((BLOCK_K,), tl.float32),
    )  # fmt: skip
    first = program * tokens_per_program
    for token in range(first, tl.minimum(first + tokens_per_program, tokens)):
        angle = token % angles * width
        c, _ = _load_row(cos + angle, HALF, BLOCK_K)
        s, _ = _load_row(sin + angle, HALF, BLOCK_K)
        dw1, dw2 = _rotate_and_norm_backward(
            dq, qkv, d_qkv, q_weight, token, heads * width, stride, c, s, eps, heads, HALF, BLOCK_H, BLOCK_K
        )
        q_sum1 += dw1
        q_sum2 += dw2
        dw1, dw2 = _rotate_and_norm_backward(
            dk, qkv + k_start, d_qkv + k_start, k_weight, token, kv_heads * width, stride, c, s, eps, kv_heads,
            HALF, BLOCK_G, BLOCK_K,
        )  # fmt: skip
        k_sum1 += dw1
        k_sum2 += dw2
        offset = tl.arange(0, BLOCK_G * BLOCK_K * 2)
        mask = offset < kv_heads * width
        value = tl.load(dv + token * kv_heads * width + offset, mask, 0.0)
        tl.store(d_qkv + v_start + token * stride + offset, value, mask)
    column = tl.arange(0, BLOCK_K)
    mask = column < HALF
    at = partial_sums + program * 2 * width + column
    tl.store(at, q_sum1, mask)
    tl.store(at + HALF, q_sum2, mask)
    tl.store(at + width, k_sum1, mask)
    tl.store(at + width + HALF, k_sum2, mask)


@kernel_op
def norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """[B, T, (H + 2 G) K] to q [B, T, H, K] and k [B, T, G, K], normalized by head, then rotated."""
    head_dim = cos.shape[-1]
    q, k = (qkv.new_empty(*qkv.shape[:2], count, head_dim) for count in (heads, kv_heads))
    if has_memory(q):
        x = qkv.contiguous()
        q_source, k_source, _ = split_qkv(x.flatten(0, 1), heads, kv_heads)
        _norm_rope_forward[(q.shape[0] * q.shape[1],)](
            q_source, k_source, q, k, q_weight, k_weight, cos.contiguous(), sin.contiguous(),
            cos.numel() // head_dim, eps, heads, kv_heads, x.shape[-1], **_head_blocks(heads, kv_heads, head_dim),
        )  # fmt: skip
    return q, k


@kernel_op
def norm_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of qkv, and the partial sums of those of the two weights, fp32 [programs, 2, K]."""
    heads, kv_heads, head_dim = dq.shape[2], dk.shape[2], dq.shape[3]
    tokens = qkv.shape[0] * qkv.shape[1]
    tokens_per_program, programs = split_rows(tokens)
    d_qkv, partial_sums = qkv.new_empty(qkv.shape), qkv.new_empty(programs, 2, head_dim, dtype=torch.float32)
    if has_memory(d_qkv):
        _norm_rope_backward[(programs,)](
            dq.contiguous(), dk.contiguous(), dv.contiguous(), qkv.contiguous(), d_qkv, q_weight, k_weight,
            cos.contiguous(), sin.contiguous(), partial_sums, cos.numel() // head_dim, eps, tokens,
            tokens_per_program, heads, kv_heads, **_head_blocks(heads, kv_heads, head_dim),
        )  # fmt: skip
    return d_qkv, partial_sums


PARTIAL_SUM_OPS.add(torch.ops.trainyard.norm_rope_backward.default)

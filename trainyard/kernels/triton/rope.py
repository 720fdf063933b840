"""Rotary embedding on the output of a fused QKV projection, also after an RMSNorm of each head of q and k.

Forward writes rotated queries and keys to new tensors (values stay in place); backward merges three gradients into one.
Cosines and sines are [T, R] or [B, 1, T, R] for the first R dims of a head, in halves or, interleaved, in pairs. The
other dims are pairs that turn by no angle.
"""

import torch
from torch import Tensor

from trainyard.compat import has_memory
from trainyard.kernels.custom_op import PARTIAL_SUM_OPS, kernel_op
from trainyard.kernels.reference import split_qkv
from trainyard.kernels.triton.column_sums import split_rows
from trainyard.kernels.triton.language import tl, triton


@triton.jit
def _columns(HALF, TURNS, BLOCK_K):  # type: ignore[no-untyped-def]
    """The dims of both members of each of the HALF pairs of a head, [1, BLOCK_K]. The first TURNS pairs rotate."""
    pair = tl.arange(0, BLOCK_K)[None, :]
    first, second = pair, pair + HALF
    if TURNS < HALF:
        first, second = tl.where(pair < TURNS, pair, TURNS + pair), tl.where(pair < TURNS, TURNS + pair, HALF + pair)
    return first, second


@triton.jit
def _load_angle(cos, sin, TURNS, INTERLEAVED, BLOCK_K):  # type: ignore[no-untyped-def]
    """Cosine and sine of each pair, [1, BLOCK_K]."""
    pair = tl.arange(0, BLOCK_K)[None, :]
    at = 2 * pair if INTERLEAVED else pair
    return tl.load(cos + at, pair < TURNS, 1.0).to(tl.float32), tl.load(sin + at, pair < TURNS, 0.0).to(tl.float32)


@triton.jit
def _load_heads(source, token, stride, heads, HALF, TURNS, INTERLEAVED, BLOCK_H, BLOCK_K):  # type: ignore[no-untyped-def]
    """Both members of the pairs of all heads of a token, fp32."""
    head = tl.arange(0, BLOCK_H)[:, None]
    at = source + token * stride + head * 2 * HALF
    if INTERLEAVED:  # whole rows, of which threads load many bytes at once
        column = tl.arange(0, 2 * BLOCK_K)[None, :]
        x = tl.load(at + column, (head < heads) & (column < 2 * HALF), 0.0)
        x1, x2 = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_K, 2)))
    else:
        mask = (head < heads) & (tl.arange(0, BLOCK_K)[None, :] < HALF)
        first, second = _columns(HALF, TURNS, BLOCK_K)
        x1, x2 = tl.load(at + first, mask, 0.0), tl.load(at + second, mask, 0.0)
    return x1.to(tl.float32), x2.to(tl.float32)


@triton.jit
def _store_heads(target, token, stride, heads, x1, x2, HALF, TURNS, INTERLEAVED, BLOCK_H, BLOCK_K):  # type: ignore[no-untyped-def]
    head = tl.arange(0, BLOCK_H)[:, None]
    at = target + token * stride + head * 2 * HALF
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK_K)[None, :]
        x = tl.reshape(tl.join(x1, x2), (BLOCK_H, 2 * BLOCK_K))
        tl.store(at + column, x.to(target.dtype.element_ty), (head < heads) & (column < 2 * HALF))
    else:
        mask = (head < heads) & (tl.arange(0, BLOCK_K)[None, :] < HALF)
        first, second = _columns(HALF, TURNS, BLOCK_K)
        tl.store(at + first, x1.to(target.dtype.element_ty), mask)
        tl.store(at + second, x2.to(target.dtype.element_ty), mask)


@triton.jit
def _load_row(source, HALF, TURNS, INTERLEAVED, BLOCK_K):  # type: ignore[no-untyped-def]
    """Both members of the pairs of a vector, fp32 [1, BLOCK_K]."""
    return _load_heads(source, 0, 0, 1, HALF, TURNS, INTERLEAVED, 1, BLOCK_K)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    source, target, token, source_stride, target_stride, c, s, heads, HALF, TURNS, INTERLEAVED, BLOCK_H, BLOCK_K
):
    x1, x2 = _load_heads(source, token, source_stride, heads, HALF, TURNS, INTERLEAVED, BLOCK_H, BLOCK_K)
    y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
    _store_heads(target, token, target_stride, heads, y1, y2, HALF, TURNS, INTERLEAVED, BLOCK_H, BLOCK_K)


@triton.jit
def _rope_kernel(  # type: ignore[no-untyped-def]
    q, k, v, q_target, k_target, v_target, cos, sin, angles, heads, kv_heads,
    q_source_stride, k_source_stride, v_source_stride, q_target_stride, k_target_stride, v_target_stride,
    HALF: tl.constexpr, TURNS: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    angle = token % angles * 2 * TURNS
    c, s = _load_angle(cos + angle, sin + angle, TURNS, INTERLEAVED, BLOCK_K)
    s = -s if BACKWARD else s
    _rotate(
        q, q_target, token, q_source_stride, q_target_stride, c, s, heads, HALF, TURNS, INTERLEAVED, BLOCK_H, BLOCK_K
    )  # fmt: skip
    _rotate(
        k, k_target, token, k_source_stride, k_target_stride, c, s, kv_heads, HALF, TURNS, INTERLEAVED, BLOCK_G, BLOCK_K
    )  # fmt: skip
    if BACKWARD:
        offset = tl.arange(0, BLOCK_G * BLOCK_K * 2)
        mask = offset < kv_heads * 2 * HALF
        tl.store(
            v_target + token * v_target_stride + offset, tl.load(v + token * v_source_stride + offset, mask, 0.0), mask
        )


def _head_blocks(heads: int, kv_heads: int, head_dim: int, cos: Tensor, interleaved: bool) -> dict[str, int]:
    return {
        "HALF": head_dim // 2,
        "TURNS": cos.shape[-1] // 2,
        "INTERLEAVED": interleaved,
        "BLOCK_H": triton.next_power_of_2(heads),
        "BLOCK_G": triton.next_power_of_2(kv_heads),
        "BLOCK_K": triton.next_power_of_2(head_dim // 2),
        "num_warps": 4 if heads * head_dim <= 2048 else 8,
    }


def _launch(
    sources: tuple[Tensor, ...], targets: tuple[Tensor, ...], cos: Tensor, sin: Tensor, interleaved: bool,
    backward: bool,
) -> None:  # fmt: skip
    """Sources and targets are q, k and v, [tokens, heads, head dim], each with its own stride between tokens."""
    heads, kv_heads, head_dim = sources[0].shape[1], sources[1].shape[1], sources[0].shape[2]
    _rope_kernel[(sources[0].shape[0],)](
        *sources, *targets, cos.contiguous(), sin.contiguous(), cos.numel() // cos.shape[-1], heads, kv_heads,
        *(x.stride(0) for x in (*sources, *targets)), BACKWARD=backward,
        **_head_blocks(heads, kv_heads, head_dim, cos, interleaved),
    )  # fmt: skip


@kernel_op
def rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """[B, T, (H + 2 G) K] to q [B, T, H, K] and k [B, T, G, K]."""
    head_dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    q, k = (qkv.new_empty(*qkv.shape[:2], count, head_dim) for count in (heads, kv_heads))
    if has_memory(q):
        sources = split_qkv(qkv.contiguous().flatten(0, 1), heads, kv_heads)
        targets = q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1)
        _launch(sources, targets, cos, sin, interleaved, backward=False)
    return q, k


@kernel_op
def rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Merge the gradients of q [B, T, H, K], k and v [B, T, G, K] into that of qkv."""
    batch, tokens, heads, head_dim = dq.shape
    kv_heads = dk.shape[2]
    d_qkv = dq.new_empty(batch, tokens, (heads + 2 * kv_heads) * head_dim)
    if has_memory(d_qkv):
        sources = tuple(x.contiguous().flatten(0, 1) for x in (dq, dk, dv))
        _launch(sources, split_qkv(d_qkv.flatten(0, 1), heads, kv_heads), cos, sin, interleaved, backward=True)
    return d_qkv


@triton.jit
def _norm_and_rotate(  # type: ignore[no-untyped-def]
    source, target, weight, token, source_stride, target_stride, c, s, eps, heads, HALF, TURNS, INTERLEAVED, BLOCK_H,
    BLOCK_K,
):  # fmt: skip
    x1, x2 = _load_heads(source, token, source_stride, heads, HALF, TURNS, INTERLEAVED, BLOCK_H, BLOCK_K)
    w1, w2 = _load_row(weight, HALF, TURNS, INTERLEAVED, BLOCK_K)
    r = 1 / tl.sqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF) + eps)[:, None]
    n1, n2 = x1 * r * w1, x2 * r * w2
    y1, y2 = n1 * c - n2 * s, n2 * c + n1 * s
    _store_heads(target, token, target_stride, heads, y1, y2, HALF, TURNS, INTERLEAVED, BLOCK_H, BLOCK_K)


@triton.jit
def _norm_rope_forward(  # type: ignore[no-untyped-def]
    q, k, q_target, k_target, q_weight, k_weight, cos, sin, angles, eps, heads, kv_heads, stride,
    HALF: tl.constexpr, TURNS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    angle = token % angles * 2 * TURNS
    c, s = _load_angle(cos + angle, sin + angle, TURNS, INTERLEAVED, BLOCK_K)
    width = 2 * HALF
    _norm_and_rotate(
        q, q_target, q_weight, token, stride, heads * width, c, s, eps, heads, HALF, TURNS, INTERLEAVED, BLOCK_H,
        BLOCK_K,
    )  # fmt: skip
    _norm_and_rotate(
        k, k_target, k_weight, token, stride, kv_heads * width, c, s, eps, kv_heads, HALF, TURNS, INTERLEAVED, BLOCK_G,
        BLOCK_K,
    )  # fmt: skip


@triton.jit
def _rotate_and_norm_backward(  # type: ignore[no-untyped-def]
    d_out, x, dx, weight, token, d_out_stride, stride, c, s, eps, heads, HALF, TURNS, INTERLEAVED, BLOCK_H, BLOCK_K
):
    """Store the gradient of x; return that of the weight for this token, for both members of the pairs."""
    g1, g2 = _load_heads(d_out, token, d_out_stride, heads, HALF, TURNS, INTERLEAVED, BLOCK_H, BLOCK_K)
    g1, g2 = g1 * c + g2 * s, g2 * c - g1 * s
    x1, x2 = _load_heads(x, token, stride, heads, HALF, TURNS, INTERLEAVED, BLOCK_H, BLOCK_K)
    r = 1 / tl.sqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF) + eps)[:, None]
    n1, n2 = x1 * r, x2 * r
    dw1, dw2 = tl.sum(g1 * n1, 0), tl.sum(g2 * n2, 0)
    w1, w2 = _load_row(weight, HALF, TURNS, INTERLEAVED, BLOCK_K)
    g1, g2 = g1 * w1, g2 * w2
    mean = (tl.sum(g1 * n1 + g2 * n2, 1) / (2 * HALF))[:, None]
    g1, g2 = (g1 - n1 * mean) * r, (g2 - n2 * mean) * r
    _store_heads(dx, token, stride, heads, g1, g2, HALF, TURNS, INTERLEAVED, BLOCK_H, BLOCK_K)
    return dw1, dw2


@triton.jit
def _norm_rope_backward(  # type: ignore[no-untyped-def]
    dq, dk, dv, qkv, d_qkv, q_weight, k_weight, cos, sin, partial_sums, angles, eps, tokens, tokens_per_program,
    heads, kv_heads, HALF: tl.constexpr, TURNS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
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
        angle = token % angles * 2 * TURNS
        c, s = _load_angle(cos + angle, sin + angle, TURNS, INTERLEAVED, BLOCK_K)
        dw1, dw2 = _rotate_and_norm_backward(
            dq, qkv, d_qkv, q_weight, token, heads * width, stride, c, s, eps, heads,
            HALF, TURNS, INTERLEAVED, BLOCK_H, BLOCK_K,
        )  # fmt: skip
        q_sum1 += dw1
        q_sum2 += dw2
        dw1, dw2 = _rotate_and_norm_backward(
            dk, qkv + k_start, d_qkv + k_start, k_weight, token, kv_heads * width, stride, c, s, eps, kv_heads,
            HALF, TURNS, INTERLEAVED, BLOCK_G, BLOCK_K,
        )  # fmt: skip
        k_sum1 += dw1
        k_sum2 += dw2
        offset = tl.arange(0, BLOCK_G * BLOCK_K * 2)
        mask = offset < kv_heads * width
        value = tl.load(dv + token * kv_heads * width + offset, mask, 0.0)
        tl.store(d_qkv + v_start + token * stride + offset, value, mask)
    q_sums = partial_sums + program * 2 * width
    _store_heads(q_sums, 0, 0, 1, q_sum1[None, :], q_sum2[None, :], HALF, TURNS, INTERLEAVED, 1, BLOCK_K)
    _store_heads(q_sums + width, 0, 0, 1, k_sum1[None, :], k_sum2[None, :], HALF, TURNS, INTERLEAVED, 1, BLOCK_K)


@kernel_op
def norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, heads: int, kv_heads: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[B, T, (H + 2 G) K] to q [B, T, H, K] and k [B, T, G, K], normalized by head, then rotated."""
    head_dim = q_weight.shape[0]
    q, k = (qkv.new_empty(*qkv.shape[:2], count, head_dim) for count in (heads, kv_heads))
    if has_memory(q):
        x = qkv.contiguous()
        q_source, k_source, _ = split_qkv(x.flatten(0, 1), heads, kv_heads)
        _norm_rope_forward[(q.shape[0] * q.shape[1],)](
            q_source, k_source, q, k, q_weight, k_weight, cos.contiguous(), sin.contiguous(),
            cos.numel() // cos.shape[-1], eps, heads, kv_heads, x.shape[-1],
            **_head_blocks(heads, kv_heads, head_dim, cos, interleaved),
        )  # fmt: skip
    return q, k


@kernel_op
def norm_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor,
    sin: Tensor, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of qkv, and the partial sums of those of the two weights, fp32 [programs, 2, K]."""
    heads, kv_heads, head_dim = dq.shape[2], dk.shape[2], dq.shape[3]
    tokens = qkv.shape[0] * qkv.shape[1]
    tokens_per_program, programs = split_rows(tokens)
    d_qkv, partial_sums = qkv.new_empty(qkv.shape), qkv.new_empty(programs, 2, head_dim, dtype=torch.float32)
    if has_memory(d_qkv):
        _norm_rope_backward[(programs,)](
            dq.contiguous(), dk.contiguous(), dv.contiguous(), qkv.contiguous(), d_qkv, q_weight, k_weight,
            cos.contiguous(), sin.contiguous(), partial_sums, cos.numel() // cos.shape[-1], eps, tokens,
            tokens_per_program, heads, kv_heads, **_head_blocks(heads, kv_heads, head_dim, cos, interleaved),
        )  # fmt: skip
    return d_qkv, partial_sums


PARTIAL_SUM_OPS.add(torch.ops.trainyard.norm_rope_backward.default)

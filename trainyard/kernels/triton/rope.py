"""From the product of a fused QKV matrix to rotated queries and keys, each in memory of its own (values stay where they
are); and back from three gradients to one. Cosines and sines are [T, K] (or [B, 1, T, K]) with equal halves."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rope_rotate(source, to, token, from_stride, to_stride, angle, cos, sin, heads, HALF, SIGN, BLOCK_H, BLOCK_K):  # type: ignore[no-untyped-def]
    head = tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK_K)[None, :]
    mask = (head < heads) & (column < HALF)
    c = tl.load(cos + angle * 2 * HALF + column, column < HALF, 0.0)
    s = tl.load(sin + angle * 2 * HALF + column, column < HALF, 0.0) * SIGN
    at = head * 2 * HALF + column
    x1 = tl.load(source + token * from_stride + at, mask, 0.0).to(tl.float32)
    x2 = tl.load(source + token * from_stride + at + HALF, mask, 0.0).to(tl.float32)
    tl.store(to + token * to_stride + at, (x1 * c - x2 * s).to(to.dtype.element_ty), mask)
    tl.store(to + token * to_stride + at + HALF, (x2 * c + x1 * s).to(to.dtype.element_ty), mask)


@triton.jit
def _rope_kernel(  # type: ignore[no-untyped-def]
    q, k, v, to_q, to_k, to_v, cos, sin, angles, heads, kv, q_from, k_from, v_from, q_to, k_to, v_to,
    HALF: tl.constexpr, BACKWARD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    angle = token % angles
    sign: tl.constexpr = -1 if BACKWARD else 1
    _rope_rotate(q, to_q, token, q_from, q_to, angle, cos, sin, heads, HALF, sign, BLOCK_H, BLOCK_K)
    _rope_rotate(k, to_k, token, k_from, k_to, angle, cos, sin, kv, HALF, sign, BLOCK_G, BLOCK_K)
    if BACKWARD:
        at = tl.arange(0, BLOCK_G * BLOCK_K * 2)
        mask = at < kv * 2 * HALF
        tl.store(to_v + token * v_to + at, tl.load(v + token * v_from + at, mask, 0.0), mask)


def _launch(
    sources: list[Tensor], targets: list[Tensor], cos: Tensor, sin: Tensor, heads: int, kv: int, backward: bool
) -> None:
    """Tensors are [tokens, ...] with rows of their own stride."""
    size = cos.shape[-1]
    half = size // 2
    _rope_kernel[(sources[0].shape[0],)](
        *sources,
        *targets,
        cos,
        sin,
        cos.numel() // size,
        heads,
        kv,
        *(x.stride(0) for x in (*sources, *targets)),
        HALF=half,
        BACKWARD=backward,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_G=triton.next_power_of_2(kv),
        BLOCK_K=triton.next_power_of_2(half),
        num_warps=4 if heads * size <= 2048 else 8,
    )


def _split_qkv(qkv: Tensor, heads: int, kv: int, size: int) -> list[Tensor]:
    """Queries, keys and values where they lie in the rows of `qkv`."""
    flat = qkv.view(-1, qkv.shape[-1])
    return list(torch.split(flat, [heads * size, kv * size, kv * size], 1))


@torch.library.custom_op("trainyard::rope", mutates_args=())
def rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """[B, T, (H + 2 G) K] to q [B, T, H, K] and k [B, T, G, K]."""
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    size = cos.shape[-1]
    q, k = (qkv.new_empty(*qkv.shape[:2], count, size) for count in (heads, kv_heads))
    targets = [x.view(-1, x.shape[2] * size) for x in (q, k, k)]
    _launch(_split_qkv(qkv, heads, kv_heads, size), targets, cos, sin, heads, kv_heads, backward=False)
    return q, k


@rope.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv: int) -> tuple[Tensor, Tensor]:
    q, k = (qkv.new_empty(*qkv.shape[:2], count, cos.shape[-1]) for count in (heads, kv))
    return q, k


@torch.library.custom_op("trainyard::rope_backward", mutates_args=())
def rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients of q [B, T, H, K], k and v [B, T, G, K] to that of qkv."""
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, tokens, heads, size = dq.shape
    kv = dk.shape[2]
    d_qkv = dq.new_empty(batch, tokens, (heads + 2 * kv) * size)
    sources = [x.contiguous().view(-1, x.shape[2] * size) for x in (dq, dk, dv)]
    _launch(sources, _split_qkv(d_qkv, heads, kv, size), cos, sin, heads, kv, backward=True)
    return d_qkv


@rope_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return dq.new_empty(*dq.shape[:2], (dq.shape[2] + 2 * dk.shape[2]) * dq.shape[3])

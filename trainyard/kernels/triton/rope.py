"""Rotary embedding on the output of a fused QKV projection.

Forward writes rotated queries and keys to new tensors (values stay in place); backward merges three gradients into one.
Cosines and sines are [T, K] or [B, 1, T, K], with equal halves.
"""

from torch import Tensor

from trainyard.compat import has_memory
from trainyard.kernels.custom_op import kernel_op
from trainyard.kernels.reference import split_qkv
from trainyard.kernels.triton.language import tl, triton


@triton.jit
def _rope_rotate(  # type: ignore[no-untyped-def]
    source, target, token, source_stride, target_stride, angle, cos, sin, heads, HALF, SIGN, BLOCK_H, BLOCK_K
):
    head = tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK_K)[None, :]
    mask = (head < heads) & (column < HALF)
    c = tl.load(cos + angle * 2 * HALF + column, column < HALF, 0.0)
    s = tl.load(sin + angle * 2 * HALF + column, column < HALF, 0.0) * SIGN
    offset = head * 2 * HALF + column
    x1 = tl.load(source + token * source_stride + offset, mask, 0.0).to(tl.float32)
    x2 = tl.load(source + token * source_stride + offset + HALF, mask, 0.0).to(tl.float32)
    tl.store(target + token * target_stride + offset, (x1 * c - x2 * s).to(target.dtype.element_ty), mask)
    tl.store(target + token * target_stride + offset + HALF, (x2 * c + x1 * s).to(target.dtype.element_ty), mask)


@triton.jit
def _rope_kernel(  # type: ignore[no-untyped-def]
    q, k, v, q_target, k_target, v_target, cos, sin, angles, heads, kv_heads,
    q_source_stride, k_source_stride, v_source_stride, q_target_stride, k_target_stride, v_target_stride,
    HALF: tl.constexpr, BACKWARD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    angle = token % angles
    sign: tl.constexpr = -1 if BACKWARD else 1
    _rope_rotate(
        q, q_target, token, q_source_stride, q_target_stride, angle, cos, sin, heads, HALF, sign, BLOCK_H, BLOCK_K
    )
    _rope_rotate(
        k, k_target, token, k_source_stride, k_target_stride, angle, cos, sin, kv_heads, HALF, sign, BLOCK_G, BLOCK_K
    )
    if BACKWARD:
        offset = tl.arange(0, BLOCK_G * BLOCK_K * 2)
        mask = offset < kv_heads * 2 * HALF
        tl.store(
            v_target + token * v_target_stride + offset, tl.load(v + token * v_source_stride + offset, mask, 0.0), mask
        )


def _launch(sources: tuple[Tensor, ...], targets: tuple[Tensor, ...], cos: Tensor, sin: Tensor, backward: bool) -> None:
    """Sources and targets are q, k and v, [tokens, heads, head dim], each with its own stride between tokens."""
    heads, kv_heads, head_dim = sources[0].shape[1], sources[1].shape[1], cos.shape[-1]
    _rope_kernel[(sources[0].shape[0],)](
        *sources, *targets, cos.contiguous(), sin.contiguous(), cos.numel() // head_dim, heads, kv_heads,
        *(x.stride(0) for x in (*sources, *targets)), HALF=head_dim // 2, BACKWARD=backward,
        BLOCK_H=triton.next_power_of_2(heads), BLOCK_G=triton.next_power_of_2(kv_heads),
        BLOCK_K=triton.next_power_of_2(head_dim // 2), num_warps=4 if heads * head_dim <= 2048 else 8,
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

"""Queries and keys of latent attention: the last dims of queries rotate, and keys get the one that all heads share.

Shapes: B batch, T tokens, H heads, K width of queries and keys, R of it with positions, V width of values.
"""

from typing import Any

import torch
from torch import Tensor

from trainyard.compat import has_memory
from trainyard.kernels.custom_op import kernel_op
from trainyard.kernels.triton.language import tl, triton


@triton.jit
def _copy_columns(source, target, source_stride, target_stride, heads, columns, BLOCK_H, BLOCK):  # type: ignore[no-untyped-def]
    """The first columns of all heads of a token."""
    head, column = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (head < heads) & (column < columns)
    tl.store(target + head * target_stride + column, tl.load(source + head * source_stride + column, mask, 0.0), mask)


@triton.jit
def _rotate_end_kernel(  # type: ignore[no-untyped-def]
    x, out, cos, sin, angles, heads, K: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = token * heads * K
    _copy_columns(x + row, out + row, K, K, heads, K - R, BLOCK_H, BLOCK_N)
    head, pair = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_P)[None, :]
    mask = (head < heads) & (pair < R // 2)
    first, second = pair, pair + R // 2
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    angle = token % angles * R + first
    c = tl.load(cos + angle, pair < R // 2, 1.0).to(tl.float32)
    s = tl.load(sin + angle, pair < R // 2, 0.0).to(tl.float32)
    s = -s if BACKWARD else s
    at = row + head * K + K - R
    x1 = tl.load(x + at + first, mask, 0.0).to(tl.float32)
    x2 = tl.load(x + at + second, mask, 0.0).to(tl.float32)
    tl.store(out + at + first, (x1 * c - x2 * s).to(out.dtype.element_ty), mask)
    tl.store(out + at + second, (x2 * c + x1 * s).to(out.dtype.element_ty), mask)


@triton.jit
def _join_keys_kernel(  # type: ignore[no-untyped-def]
    expanded, shared, keys, heads, K: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    E: tl.constexpr = K - R + V
    row = token * heads * K
    _copy_columns(expanded + token * heads * E, keys + row, E, K, heads, K - R, BLOCK_H, BLOCK_N)
    head, column = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_R)[None, :]
    key = tl.load(shared + token * R + column, column < R, 0.0)
    mask = (head < heads) & (column < R)
    tl.store(keys + row + head * K + K - R + column, tl.broadcast_to(key, (BLOCK_H, BLOCK_R)), mask)


@triton.jit
def _join_keys_backward(  # type: ignore[no-untyped-def]
    d_keys, d_values, d_expanded, d_shared, heads, K: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    E: tl.constexpr = K - R + V
    row, target = token * heads * K, d_expanded + token * heads * E
    _copy_columns(d_keys + row, target, K, E, heads, K - R, BLOCK_H, BLOCK_N)
    _copy_columns(d_values + token * heads * V, target + K - R, V, E, heads, V, BLOCK_H, BLOCK_V)
    head, column = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_R)[None, :]
    mask = (head < heads) & (column < R)
    d = tl.load(d_keys + row + head * K + K - R + column, mask, 0.0).to(tl.float32)
    column = tl.arange(0, BLOCK_R)
    tl.store(d_shared + token * R + column, tl.sum(d, 0).to(d_shared.dtype.element_ty), column < R)


def _blocks(heads: int, key: int, rotated: int) -> dict[str, int]:
    fixed = triton.next_power_of_2(max(key - rotated, 1))
    return {"K": key, "R": rotated, "BLOCK_H": triton.next_power_of_2(heads), "BLOCK_N": fixed, "num_warps": 4}


@kernel_op
def rotate_end(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool) -> Tensor:
    """[B, T, H, K] with its last R dims rotated, or turned back; cosines and sines are [T, R] or [B, 1, T, R]."""
    out = x.new_empty(x.shape)
    if has_memory(out):
        x, (_, _, heads, key), rotated = x.contiguous(), x.shape, cos.shape[-1]
        pairs = triton.next_power_of_2(rotated // 2)
        _rotate_end_kernel[(x.shape[0] * x.shape[1],)](
            x, out, cos.contiguous(), sin.contiguous(), cos.numel() // rotated, heads, INTERLEAVED=interleaved,
            BACKWARD=backward, BLOCK_P=pairs, **_blocks(heads, key, rotated),
        )  # fmt: skip
    return out


@kernel_op
def join_keys(expanded: Tensor, shared: Tensor, value_size: int) -> Tensor:
    """Keys [B, T, H, K] from what a head has for itself and for its values [B, T, H, K - R + V], and the columns that
    heads share [B, T, R]."""
    B, T, heads, width = expanded.shape
    key = width - value_size + shared.shape[-1]
    keys = expanded.new_empty(B, T, heads, key)
    if has_memory(keys):
        blocks = _blocks(heads, key, shared.shape[-1])
        _join_keys_kernel[(B * T,)](
            expanded.contiguous(), shared.contiguous(), keys, heads, V=value_size,
            BLOCK_R=triton.next_power_of_2(shared.shape[-1]), **blocks,
        )  # fmt: skip
    return keys


@kernel_op
def join_keys_backward(d_keys: Tensor, d_values: Tensor, shared_size: int) -> tuple[Tensor, Tensor]:
    """The gradients of both, from those of keys [B, T, H, K] and values [B, T, H, V]."""
    (B, T, heads, key), value = d_keys.shape, d_values.shape[-1]
    d_expanded = d_keys.new_empty(B, T, heads, key - shared_size + value)
    d_shared = d_keys.new_empty(B, T, shared_size)
    if has_memory(d_expanded):
        _join_keys_backward[(B * T,)](
            d_keys.contiguous(), d_values.contiguous(), d_expanded, d_shared, heads, V=value,
            BLOCK_R=triton.next_power_of_2(shared_size), BLOCK_V=triton.next_power_of_2(value),
            **_blocks(heads, key, shared_size),
        )  # fmt: skip
    return d_expanded, d_shared


class RotateEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        out: Tensor = rotate_end(x, cos, sin, interleaved, False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return rotate_end(grads[0], *ctx.saved_tensors, ctx.interleaved, True), None, None, None


class JoinKeys(torch.autograd.Function):
    """Keys, and values as a view: backward writes both gradients into one tensor."""

    @staticmethod
    def forward(ctx: Any, expanded: Tensor, shared: Tensor, value_size: int) -> tuple[Tensor, Tensor]:
        ctx.shared_size = shared.shape[-1]
        return join_keys(expanded, shared, value_size), expanded[..., -value_size:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *join_keys_backward(*grads, ctx.shared_size), None

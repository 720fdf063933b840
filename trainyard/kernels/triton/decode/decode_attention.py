"""Attention of one new token per slot over a slotted KV cache, with RoPE and the cache write in the same kernel."""

# Programs split the keys of a slot and kv head evenly by the slot's length, so that the grid is static while the work
# follows the lengths. The last program of a slot and kv head combines the parts in a fixed order. The first program
# rotates the new key, writes it and the new value to the cache, and starts its softmax with them.
#
# Shapes: B slots, H heads, G kv heads, R heads per kv head, S positions of the cache, K head dim, V width of values.
# Exponents are base 2. A sink is like a first key whose value is 0.

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.reference import PLAIN_SCORES, AttentionScores
from trainyard.kernels.triton.attention.tiles import LOG2_E, capped, dot
from trainyard.kernels.triton.decode.dependent_launch import (
    arrival_counters,
    is_last_program,
    launch_options,
    start,
    wait,
)


class DecodeAttentionConfig(NamedTuple):
    """Programs per slot and kv head, keys per block, and launch options."""

    splits: int
    block_s: int
    num_warps: int
    num_stages: int


@triton.jit
def _load_rotated(x, cos, sin, column, mask, HEAD_DIM: tl.constexpr, HAS_ROPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows at `x` (a block of pointers to their starts) with RoPE on halves, in the dtype of x."""
    v = tl.load(x + column, mask, 0.0)
    if HAS_ROPE:
        partner = tl.load(x + (column + HEAD_DIM // 2) % HEAD_DIM, mask, 0.0).to(tl.float32)
        partner = tl.where(column < HEAD_DIM // 2, -partner, partner)
        c = tl.load(cos + column, column < HEAD_DIM, 0.0).to(tl.float32)
        s = tl.load(sin + column, column < HEAD_DIM, 0.0).to(tl.float32)
        v = (v.to(tl.float32) * c + partner * s).to(v.dtype)
    return v


@triton.jit
def _load_rows(x, position, s, end, column, size, HEAD_DIM: tl.constexpr, IS_RING: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows `position + s` of [S, K] in the cache, zero from `end` on."""
    row = (position + s) % size if IS_RING else position + s
    offset = row[:, None] * HEAD_DIM + column[None, :]
    mask = (position + s < end)[:, None] & (column < HEAD_DIM)[None, :]
    return tl.load(x + offset, mask, 0.0, cache_modifier=".cg")  # read once: not through the L1 cache


@triton.jit
def _attend_by_rows(  # type: ignore[no-untyped-def]
    query, new_score, new_total, new_value, key, value, k_cache, v_cache, first, end, s, column, value_column, size,
    soft_cap, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, IS_RING: tl.constexpr, HAS_CAP: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Softmax statistics and weighted sum of one head without tensor cores. Each row of a block has a softmax of its
    own until the end, so that warps never wait for each other. `key` and `value` are the first block."""
    top = tl.where(s == 0, new_score, -1e30)
    total = tl.where(s == 0, new_total, 0.0)
    acc = tl.where((s == 0)[:, None], new_value, 0.0)
    for position in range(first, end, BLOCK_S):
        this_key, this_value = key, value
        key = _load_rows(k_cache, position + BLOCK_S, s, end, column, size, HEAD_DIM, IS_RING)
        value = _load_rows(v_cache, position + BLOCK_S, s, end, value_column, size, VALUE_DIM, IS_RING)
        score = tl.sum(this_key.to(tl.float32) * query, 1)
        if HAS_CAP:
            score = capped(score, soft_cap)
        in_range = position + s < end
        new_top = tl.where(in_range, tl.maximum(top, score), top)
        weight = tl.where(in_range, tl.exp2(score - new_top), 0.0)
        decay = tl.exp2(top - new_top)
        total = total * decay + weight
        acc = acc * decay[:, None] + weight[:, None] * this_value.to(tl.float32)
        top = new_top
    block_top = tl.max(top, 0, keep_dims=True)
    decay = tl.exp2(top - block_top)
    return block_top, tl.sum(total * decay, 0, keep_dims=True), tl.sum(acc * decay[:, None], 0, keep_dims=True)


@triton.jit
def _attend_by_matmuls(  # type: ignore[no-untyped-def]
    query, new_score, new_total, new_value, k_cache, v_cache, first, end, s, column, value_column, size, scale,
    soft_cap, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, IS_RING: tl.constexpr, HAS_CAP: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The same for all heads of a kv head, with tensor cores."""
    top = new_score
    total = new_total
    acc = new_value
    for position in range(first, end, BLOCK_S):
        in_range = (position + s < end)[None, :]
        key = _load_rows(k_cache, position, s, end, column, size, HEAD_DIM, IS_RING)
        score = dot(query, key.T) * scale
        if HAS_CAP:
            score = capped(score, soft_cap)
        score = tl.where(in_range, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weight, 1)
        value = _load_rows(v_cache, position, s, end, value_column, size, VALUE_DIM, IS_RING)
        acc = dot(weight.to(value.dtype), value, acc * decay[:, None])
        top = new_top
    return top, total, acc


@triton.jit
def _decode_attention_kernel(  # type: ignore[no-untyped-def]
    q, k, v, k_cache, v_cache, lengths, cos, sin, sinks, out, partial, partial_lse, counters, scale, soft_cap,
    q_slot_stride, q_head_stride, k_slot_stride, k_head_stride, v_slot_stride, v_head_stride, angle_stride,
    max_seq_len, window,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HAS_ROPE: tl.constexpr,
    IS_RING: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    split, g, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + slot)
    place = length % max_seq_len
    if not IS_RING:
        length = tl.minimum(length, max_seq_len - 1)
        place = length
    oldest = tl.maximum(length + 1 - window, 0)
    keys_per_split = tl.cdiv(tl.cdiv(length - oldest, SPLITS), 16) * 16
    first = oldest + split * keys_per_split
    end = tl.minimum(first + keys_per_split, length)
    cache = (slot * G + g) * max_seq_len
    k_cache += cache * HEAD_DIM
    v_cache += cache * VALUE_DIM
    column = tl.arange(0, BLOCK_K)
    value_column = tl.arange(0, BLOCK_V)
    in_value = value_column < VALUE_DIM
    s = tl.arange(0, BLOCK_S)
    r = tl.arange(0, BLOCK_R)
    in_head = column < HEAD_DIM
    if BLOCK_R == 1:
        key = _load_rows(k_cache, first, s, end, column, max_seq_len, HEAD_DIM, IS_RING)
        value = _load_rows(v_cache, first, s, end, value_column, max_seq_len, VALUE_DIM, IS_RING)
    wait(PDL)
    if split == 0 or first < end:
        scale *= LOG2_E
        if HAS_ROPE:
            cos += slot * angle_stride
            sin += slot * angle_stride
        head = g * R + r
        query_mask = (r < R)[:, None] & in_head[None, :]
        query_row = q + slot * q_slot_stride + head[:, None] * q_head_stride
        query = _load_rotated(query_row, cos, sin, column[None, :], query_mask, HEAD_DIM, HAS_ROPE)
        new_score = tl.full((BLOCK_R,), -1e30, tl.float32)
        new_total = tl.zeros((BLOCK_R,), tl.float32)
        new_value = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
        if split == 0:
            key_row = k + slot * k_slot_stride + g * k_head_stride
            new_key = _load_rotated(key_row, cos, sin, column, in_head, HEAD_DIM, HAS_ROPE)
            raw_value = tl.load(v + slot * v_slot_stride + g * v_head_stride + value_column, in_value, 0.0)
            tl.store(k_cache + place * HEAD_DIM + column, new_key, in_head)
            tl.store(v_cache + place * VALUE_DIM + value_column, raw_value, in_value)
            new_score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
            if HAS_CAP:
                new_score = capped(new_score, soft_cap)
            new_total += 1.0
            new_value += raw_value.to(tl.float32)[None, :]
            if HAS_SINKS:
                sink = tl.load(sinks + head, r < R, 0.0).to(tl.float32) * LOG2_E
                top = tl.maximum(new_score, sink)
                weight = tl.exp2(new_score - top)
                new_value *= weight[:, None]
                new_total = weight + tl.exp2(sink - top)
                new_score = top
        if BLOCK_R == 1:
            top, total, acc = _attend_by_rows(
                query.to(tl.float32) * scale, new_score, new_total, new_value, key, value, k_cache, v_cache,
                first, end, s, column, value_column, max_seq_len, soft_cap, HEAD_DIM, VALUE_DIM, IS_RING, HAS_CAP,
                BLOCK_S,
            )  # fmt: skip
        else:
            top, total, acc = _attend_by_matmuls(
                query, new_score, new_total, new_value, k_cache, v_cache, first, end, s, column, value_column,
                max_seq_len, scale, soft_cap, HEAD_DIM, VALUE_DIM, IS_RING, HAS_CAP, BLOCK_S,
            )  # fmt: skip
        acc = acc / total[:, None]
        out += slot * G * R * VALUE_DIM
        value_mask = (r < R)[:, None] & in_value[None, :]
        if SPLITS == 1:
            row = out + head[:, None] * VALUE_DIM + value_column[None, :]
            tl.store(row, acc.to(out.dtype.element_ty), value_mask)
        else:
            base = (slot * G + g) * SPLITS
            partial += base * R * VALUE_DIM
            partial_lse += base * BLOCK_R
            tl.store(partial + (split * R + r)[:, None] * VALUE_DIM + value_column[None, :], acc, value_mask)
            tl.store(partial_lse + split * BLOCK_R + r, top + tl.log2(total))
            used_splits = tl.maximum(tl.cdiv(length - oldest, tl.maximum(keys_per_split, 1)), 1)
            if is_last_program(counters + slot * G + g, used_splits):
                i = tl.arange(0, SPLITS)
                used = i < used_splits
                for row in tl.static_range(R):
                    part = tl.load(
                        partial + (i * R + row)[:, None] * VALUE_DIM + value_column[None, :],
                        used[:, None] & in_value[None, :], 0.0, cache_modifier=".cg",
                    )  # fmt: skip
                    lse = tl.load(partial_lse + i * BLOCK_R + row, used, float("-inf"), cache_modifier=".cg")
                    weight = tl.exp2(lse - tl.max(lse, 0))
                    y = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
                    tl.store(out + (g * R + row) * VALUE_DIM + value_column, y.to(out.dtype.element_ty), in_value)


def attention_config(slots: int, kv_heads: int, heads_per_kv_head: int, max_seq_len: int) -> DecodeAttentionConfig:
    """Enough programs to fill a GPU and to share a long sequence, by measurements on an H200."""
    splits = max(triton.cdiv(512, slots * kv_heads), max_seq_len // 2048)
    splits = min(triton.next_power_of_2(splits), 32)
    return (
        DecodeAttentionConfig(splits, 32, 2, 1) if heads_per_kv_head == 1 else DecodeAttentionConfig(splits, 32, 1, 4)
    )


def decode_attention(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor,
    cos: Tensor | None = None, sin: Tensor | None = None, window: int | None = None,
    scores: AttentionScores = PLAIN_SCORES, config: DecodeAttentionConfig | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one token per slot, as `reference.decode_attention`. The last dims must be contiguous.

    The kernel reads `lengths` and the cache before the kernel right before it has ended: at least one other kernel must
    run after the last write to either. A model has its embedding and the qkv projection there. A cache whose S is no
    power of two is 2% faster (S + 8, say).
    """
    B, H, T, K = q_BHTK.shape
    G, S, V = v_cache.shape[1:]
    assert T == 1
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert all(x is None or x.stride(-1) == 1 for x in (q_BHTK, k_BGTK, v_BGTV, cos, sin))
    assert cos is None or sin is None or (cos.numel() == B * K and cos.stride(0) == sin.stride(0))
    R = H // G
    c = config or attention_config(B, G, R, S)
    block_r = max(16, triton.next_power_of_2(R)) if R > 1 else 1
    block_k, block_v = (max(16, triton.next_power_of_2(width)) for width in (K, V))
    out = q_BHTK.new_empty(B, 1, H, V)
    partial = partial_lse = out
    if c.splits > 1:
        partial = q_BHTK.new_empty(B * G * c.splits, R, V, dtype=torch.float32)
        partial_lse = q_BHTK.new_empty(B * G * c.splits, block_r, dtype=torch.float32)
    strides = (stride for x in (q_BHTK, k_BGTK, v_BGTV) for stride in x.stride()[:2])
    _decode_attention_kernel[(c.splits, G, B)](
        q_BHTK, k_BGTK, v_BGTV, k_cache, v_cache, lengths, cos, sin, scores.sinks, out, partial, partial_lse,
        arrival_counters(out.device), scores.scale_of(K), (scores.soft_cap or 0.0) * LOG2_E.value,
        *strides, 0 if cos is None else cos.stride(0), S, window or S,
        G=G, R=R, HEAD_DIM=K, VALUE_DIM=V, HAS_ROPE=cos is not None, IS_RING=window == S,
        HAS_CAP=scores.soft_cap is not None, HAS_SINKS=scores.sinks is not None, SPLITS=c.splits,
        BLOCK_R=block_r, BLOCK_S=c.block_s, BLOCK_K=block_k, BLOCK_V=block_v,
        num_warps=c.num_warps, num_stages=c.num_stages, **launch_options(),
    )  # fmt: skip
    return out.transpose(1, 2)

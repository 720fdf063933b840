"""Causal attention in which a query has the same bits as the only one of a decode step and as one of a long sequence.

A program takes a block of queries of one kv head, those of all its heads, and every query goes over the keys of its
document in the same blocks, in order. A block without a key that a query sees changes nothing in it, so the blocks that
a program visits may depend on its other queries.

Shapes: B samples, T queries, H heads, G kv heads, R heads per kv head, S keys, K head size, V width of values.
Exponents are base 2.
"""

import torch
from torch import Tensor

from trainyard.kernels.reference import PLAIN_SCORES, AttentionScores
from trainyard.kernels.triton.attention.tiles import LOG2_E, capped, dot
from trainyard.kernels.triton.language import tl, triton

BLOCK = {torch.float32: 32}
"""Queries and keys of a block; 64 in half precision, which matrix instructions multiply."""
NO_DOCUMENT = tl.constexpr(2**30)


@triton.jit(do_not_specialize=["T", "S"])
def _attention_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, first, starts, sinks, T, S, scale, soft_cap, window,
    q_sample, q_head, q_token, k_sample, k_head, k_token, v_sample, v_head, v_token,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    g, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token, head = row // R, g * R + row % R
    column, s = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_S)
    in_head, in_row = column < HEAD_DIM, token < T
    value_column = tl.arange(0, BLOCK_V)
    in_value = value_column < VALUE_DIM
    row_mask = in_row[:, None] & in_head[None, :]
    position = tl.load(first + sample) + token
    # The first key of a query's document; that of queries beyond the end is never reached.
    start = tl.where(in_row, 0, NO_DOCUMENT)
    if HAS_DOCUMENTS:
        start = tl.load(starts + sample * T + token, in_row, NO_DOCUMENT)
    query = tl.load(
        q + sample * q_sample + head[:, None] * q_head + token[:, None].to(tl.int64) * q_token + column[None, :],
        row_mask, 0.0,
    )  # fmt: skip
    k += sample * k_sample + g * k_head
    v += sample * v_sample + g * v_head
    top = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_SINKS:  # a first key, as it were, whose value is 0
        top = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    document = tl.min(start, 0)
    while document < NO_DOCUMENT:
        is_active = start == document
        end = tl.minimum(tl.max(tl.where(is_active, position, -1), 0) + 1, S)
        begin = document
        if HAS_WINDOW:
            oldest = tl.min(tl.where(is_active, position, NO_DOCUMENT), 0) - window + 1
            begin += tl.maximum(oldest - document, 0) // BLOCK_S * BLOCK_S
        for key in range(begin, end, BLOCK_S):
            at = key + s
            in_key = at < end
            mask = in_key[:, None] & in_head[None, :]
            keys = tl.load(k + at[:, None].to(tl.int64) * k_token + column[None, :], mask, 0.0)
            value_mask = in_key[:, None] & in_value[None, :]
            values = tl.load(v + at[:, None].to(tl.int64) * v_token + value_column[None, :], value_mask, 0.0)
            seen = is_active[:, None] & in_key[None, :] & (at[None, :] <= position[:, None])
            if HAS_WINDOW:
                seen = seen & (at[None, :] > position[:, None] - window)
            score = dot(query, tl.trans(keys)) * scale
            if HAS_CAP:
                score = capped(score, soft_cap)
            score = tl.where(seen, score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - new_top[:, None])
            decay = tl.exp2(top - new_top)
            total = total * decay + tl.sum(weight, 1)
            acc = dot(weight.to(values.dtype), values, acc * decay[:, None])
            top = new_top
        document = tl.min(tl.where(start > document, start, NO_DOCUMENT), 0)
    out_row = out + ((sample * T + token[:, None]) * (G * R) + head[:, None]) * VALUE_DIM + value_column[None, :]
    tl.store(out_row, (acc / total[:, None]).to(out.dtype.element_ty), in_row[:, None] & in_value[None, :])


def attention(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, first_B: Tensor, documents_BT: Tensor | None, window: int | None,
    scores: AttentionScores = PLAIN_SCORES,
) -> Tensor:  # fmt: skip
    """`Kernels.attention`. The last dims must be contiguous; keys may be the slots of a cache."""
    (B, H, T, K), (_, G, S, V) = q_BHTK.shape, v_BGSV.shape
    assert all(x.stride(-1) == 1 for x in (q_BHTK, k_BGSK, v_BGSV))
    out_BTHV = q_BHTK.new_empty(B, T, H, V)
    starts = first_B if documents_BT is None else document_starts(documents_BT)
    sinks = first_B if scores.sinks is None else scores.sinks
    scale, soft_cap = scores.scale_of(K) * LOG2_E.value, (scores.soft_cap or 0.0) * LOG2_E.value
    strides = (stride for x in (q_BHTK, k_BGSK, v_BGSV) for stride in x.stride()[:3])
    block = BLOCK.get(q_BHTK.dtype, 64)
    _attention_kernel[(triton.cdiv(T * H // G, block), G, B)](
        q_BHTK, k_BGSK, v_BGSV, out_BTHV, first_B, starts, sinks, T, S, scale, soft_cap, window or 0, *strides,
        G=G, R=H // G, HEAD_DIM=K, VALUE_DIM=V, HAS_DOCUMENTS=documents_BT is not None, HAS_WINDOW=window is not None,
        HAS_CAP=scores.soft_cap is not None, HAS_SINKS=scores.sinks is not None, BLOCK_M=block, BLOCK_S=block,
        BLOCK_K=max(16, triton.next_power_of_2(K)), BLOCK_V=max(16, triton.next_power_of_2(V)), num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return out_BTHV.transpose(1, 2)


def document_starts(documents_BT: Tensor) -> Tensor:
    """The position of the first token of each token's document, int32."""
    position = torch.arange(documents_BT.shape[1], dtype=torch.int32, device=documents_BT.device)
    is_first = torch.ones_like(documents_BT, dtype=torch.bool)
    is_first[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return torch.where(is_first, position, 0).cummax(1).values

"""Backward kernels: one that computes dq (and, for short sequences, dk and dv), one that computes dk and dv.

No two programs add to the same element, so results do not depend on their order.
"""

from trainyard.kernels.triton.attention.tiles import (
    LOG2_E,
    capped,
    dot,
    head_bits,
    keep_mask,
    key_ranges,
    key_terms,
    load_rows,
    mask_scores,
    query_seeds,
    store_rows,
    window_start,
    zero_dropped,
    zero_rows,
)
from trainyard.kernels.triton.language import tl, triton


@triton.jit
def _dq_over_keys(  # type: ignore[no-untyped-def]
    dq, q, dout, lse, delta, k, v, dk, dv, k_token, v_token, dk_token, start_key, end_key, length, query, a, b,
    head_term, threshold, keep_scale, MASK: tl.constexpr, FUSED: tl.constexpr, CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the contribution of a range of keys to dq. If FUSED, this block has all queries of these keys: also write dk
    and dv."""
    scale: tl.constexpr = LOG2_E * SCALE
    for start in range(start_key, end_key, N):
        key = start + tl.arange(0, N)
        kk = load_rows(k, k_token, key, length, K, BLOCK_K)
        vv = load_rows(v, v_token, key, length, K, BLOCK_K)
        score = dot(q, tl.trans(kk))
        dweight = dot(dout, tl.trans(vv))
        score = score * scale
        slope = score
        if SOFT_CAP != 0.0:  # the derivative of tanh is 1 - tanh^2
            score = capped(score, LOG2_E * SOFT_CAP)
            slope = 1 - score * score / (LOG2_E * SOFT_CAP * LOG2_E * SOFT_CAP)
        score = score - lse[:, None]
        if MASK:
            score = mask_scores(score, query, key, length, CAUSAL, WINDOW)
        weight = tl.exp2(score)
        kept_weight = weight
        if DROPOUT:
            keep = keep_mask(a[:, None], b[:, None], key_terms(key, head_term)[None, :], threshold)
            kept_weight = zero_dropped(keep, weight, keep_scale)
            dweight = zero_dropped(keep, dweight, keep_scale)
        dscore = weight * (dweight - delta[:, None])
        if SOFT_CAP != 0.0:
            dscore = dscore * slope
        dscore = dscore.to(q.dtype)
        dq = dot(dscore, kk, dq)
        if FUSED:  # transposed matmuls read the weights from shared memory without a copy
            dvv = tl.trans(dot(tl.trans(dout), kept_weight.to(q.dtype)))
            dkk = tl.trans(dot(tl.trans(q), dscore))
            store_rows(dv, dk_token, key, length, dvv * keep_scale, K, BLOCK_K)
            store_rows(dk, dk_token, key, length, dkk * (keep_scale * SCALE), K, BLOCK_K)
    return dq


@triton.jit(do_not_specialize=["tokens", "threshold"])
def dq_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, dout, dq, dk, dv, delta, cu_seqlens, seed0, seed1, site, head_offset, threshold, keep_scale,
    tokens, q_token, q_head, k_token, k_head, v_token, v_head, dout_token, dout_head, d_token,
    FUSED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries. If FUSED (no other block has queries of these keys), also dk and dv; otherwise
    store delta = sum(out * dout), [H, N], for `dkdv_kernel`."""
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    out_token = tl.num_programs(1) * K
    seq_start = tl.load(cu_seqlens + sequence).to(tl.int64)
    out_offset, grad_offset = seq_start * out_token + head * K, seq_start * d_token + head * K
    if sequence == tl.num_programs(2) - 1:
        rows, step = (tokens - seq_start).to(tl.int32), tl.num_programs(0) * M
        zero_rows(dq + grad_offset, d_token, block * M, rows, step, M, K, BLOCK_K)
        if FUSED:
            zero_rows(dk + grad_offset, d_token, block * M, rows, step, M, K, BLOCK_K)
            zero_rows(dv + grad_offset, d_token, block * M, rows, step, M, K, BLOCK_K)
        return
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block
    start_row = block * M
    length = (tl.load(cu_seqlens + sequence + 1) - seq_start).to(tl.int32)
    if start_row >= length:
        return
    query = start_row + tl.arange(0, M)
    qq = load_rows(q + seq_start * q_token + head * q_head, q_token, query, length, K, BLOCK_K)
    dd = load_rows(dout + seq_start * dout_token + head * dout_head, dout_token, query, length, K, BLOCK_K)
    oo = load_rows(out + out_offset, out_token, query, length, K, BLOCK_K)
    row_offset = head.to(tl.int64) * tokens + seq_start + query
    # Queries beyond the end are zeros with zero gradients, so their weights do not matter.
    lse_M = tl.load(lse + row_offset, mask=query < length, other=0.0)
    delta_M = tl.sum(oo.to(tl.float32) * dd.to(tl.float32), 1) / keep_scale
    if not FUSED:
        tl.store(delta + row_offset, delta_M, mask=query < length)
    k += seq_start * k_token + head // R * k_head
    v += seq_start * v_token + head // R * v_head
    a, b, head_term = query, query, head
    if DROPOUT:
        a, b = query_seeds(seed0 + seq_start, seed1 + seq_start, tl.load(site), tl.minimum(query, length - 1))
        head_term = head_bits(head_offset, head)
    unmasked_end, end = key_ranges(start_row, length, CAUSAL, M, N)
    begin = 0
    if WINDOW:
        begin = window_start(start_row, WINDOW, N)
        unmasked_end = begin
    dqq = tl.zeros((M, BLOCK_K), tl.float32)
    dqq = _dq_over_keys(
        dqq, qq, dd, lse_M, delta_M, k, v, dk + grad_offset, dv + grad_offset, k_token, v_token, d_token, begin,
        unmasked_end, length, query, a, b, head_term, threshold, keep_scale,
        False, FUSED, CAUSAL, DROPOUT, SCALE, SOFT_CAP, WINDOW, N, K, BLOCK_K,
    )  # fmt: skip
    dqq = _dq_over_keys(
        dqq, qq, dd, lse_M, delta_M, k, v, dk + grad_offset, dv + grad_offset, k_token, v_token, d_token,
        unmasked_end, end, length, query, a, b, head_term, threshold, keep_scale,
        True, FUSED, CAUSAL, DROPOUT, SCALE, SOFT_CAP, WINDOW, N, K, BLOCK_K,
    )  # fmt: skip
    store_rows(dq + grad_offset, d_token, query, length, dqq * (keep_scale * SCALE), K, BLOCK_K)


@triton.jit
def _dkdv_over_queries(  # type: ignore[no-untyped-def]
    dk, dv, k, v, q, dout, lse, delta, q_token, dout_token, start_row, end_row, length, key, seed0, seed1, site, column,
    threshold, keep_scale, MASK: tl.constexpr, DROPOUT: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr, M: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the contribution of a range of queries to dk and dv. Scores are [keys, queries], the layout these matmuls
    need."""
    scale: tl.constexpr = LOG2_E * SCALE
    for start in range(start_row, end_row, M):
        query = start + tl.arange(0, M)
        qq = load_rows(q, q_token, query, length, K, BLOCK_K)
        dd = load_rows(dout, dout_token, query, length, K, BLOCK_K)
        # Queries beyond the end have weight 0. Keys beyond it produce garbage rows, which are not stored.
        safe_query = tl.minimum(query, length - 1)
        lse_M = tl.where(query < length, tl.load(lse + safe_query), float("inf"))
        delta_M = tl.load(delta + safe_query)
        score = dot(k, tl.trans(qq))
        dweight = dot(v, tl.trans(dd))
        score = score * scale
        slope = score
        if SOFT_CAP != 0.0:
            score = capped(score, LOG2_E * SOFT_CAP)
            slope = 1 - score * score / (LOG2_E * SOFT_CAP * LOG2_E * SOFT_CAP)
        weight = tl.exp2(score - lse_M[None, :])
        if MASK:
            weight = tl.where(query[None, :] >= key[:, None], weight, 0.0)
        if WINDOW:
            weight = tl.where(query[None, :] - key[:, None] < WINDOW, weight, 0.0)
        kept_weight = weight
        if DROPOUT:
            a, b = query_seeds(seed0, seed1, site, safe_query)
            keep = keep_mask(a[None, :], b[None, :], column[:, None], threshold)
            kept_weight = zero_dropped(keep, weight, keep_scale)
            dweight = zero_dropped(keep, dweight, keep_scale)
        dscore = weight * (dweight - delta_M[None, :])
        if SOFT_CAP != 0.0:
            dscore = dscore * slope
        dscore = dscore.to(qq.dtype)
        dv = dot(kept_weight.to(dd.dtype), dd, dv)
        dk = dot(dscore, qq, dk)
    return dk, dv


@triton.jit(do_not_specialize=["tokens", "threshold"])
def dkdv_kernel(  # type: ignore[no-untyped-def]
    q, k, v, lse, dout, delta, dk, dv, cu_seqlens, seed0, seed1, site, head_offset, threshold, keep_scale, tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, dout_token, dout_head, d_token,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_start = tl.load(cu_seqlens + sequence).to(tl.int64)
    dk += seq_start * d_token + kv_head * K
    dv += seq_start * d_token + kv_head * K
    start_row = block * N
    if sequence == tl.num_programs(2) - 1:
        rows, step = (tokens - seq_start).to(tl.int32), tl.num_programs(0) * N
        zero_rows(dk, d_token, start_row, rows, step, N, K, BLOCK_K)
        zero_rows(dv, d_token, start_row, rows, step, N, K, BLOCK_K)
        return
    length = (tl.load(cu_seqlens + sequence + 1) - seq_start).to(tl.int32)
    if start_row >= length:
        return
    key = start_row + tl.arange(0, N)
    kk = load_rows(k + seq_start * k_token + kv_head * k_head, k_token, key, length, K, BLOCK_K)
    vv = load_rows(v + seq_start * v_token + kv_head * v_head, v_token, key, length, K, BLOCK_K)
    q += seq_start * q_token
    dout += seq_start * dout_token
    site_value = seq_start
    if DROPOUT:
        seed0 += seq_start
        seed1 += seq_start
        site_value = tl.load(site)
    dkk = tl.zeros((N, BLOCK_K), tl.float32)
    dvv = tl.zeros((N, BLOCK_K), tl.float32)
    for r in range(R):
        head = kv_head * R + r
        row_offset = head.to(tl.int64) * tokens + seq_start
        column = key
        if DROPOUT:
            column = key_terms(key, head_bits(head_offset, head))
        diagonal_end, end = 0, length
        if WINDOW:
            end = tl.minimum(start_row + N + WINDOW, length)
        if CAUSAL:
            diagonal_end = tl.minimum(start_row + N, length)
            dkk, dvv = _dkdv_over_queries(
                dkk, dvv, kk, vv, q + head * q_head, dout + head * dout_head, lse + row_offset, delta + row_offset,
                q_token, dout_token, start_row, diagonal_end, length, key, seed0, seed1, site_value, column,
                threshold, keep_scale, True, DROPOUT, SCALE, SOFT_CAP, WINDOW, M, K, BLOCK_K,
            )  # fmt: skip
        dkk, dvv = _dkdv_over_queries(
            dkk, dvv, kk, vv, q + head * q_head, dout + head * dout_head, lse + row_offset, delta + row_offset,
            q_token, dout_token, diagonal_end, end, length, key, seed0, seed1, site_value, column,
            threshold, keep_scale, False, DROPOUT, SCALE, SOFT_CAP, WINDOW, M, K, BLOCK_K,
        )  # fmt: skip
    store_rows(dk, d_token, key, length, dkk * (keep_scale * SCALE), K, BLOCK_K)
    store_rows(dv, d_token, key, length, dvv * keep_scale, K, BLOCK_K)

"""Forward kernel: a program handles a block of queries of one head and iterates over blocks of keys."""

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
def _forward_over_keys(  # type: ignore[no-untyped-def]
    acc, row_max, row_sum, q, k, v, k_token, v_token, start_key, end_key, length, query, a, b, head_term,
    threshold, keep_scale, MASK: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Online softmax over a range of keys: updates the weighted sum of values, the row maxima and the row sums."""
    scale: tl.constexpr = LOG2_E * SCALE
    factor: tl.constexpr = 1.0 if SOFT_CAP != 0.0 else scale
    for start in range(start_key, end_key, N):
        key = start + tl.arange(0, N)
        kk = load_rows(k, k_token, key, length, K, BLOCK_K)
        score = dot(q, tl.trans(kk))
        if SOFT_CAP != 0.0:
            score = capped(score * scale, LOG2_E * SOFT_CAP)
        if MASK:
            score = mask_scores(score, query, key, length, CAUSAL, WINDOW)
        new_max = tl.maximum(row_max, tl.max(score, 1) * factor)
        weight = tl.exp2(score * factor - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weight, 1)
        row_max = new_max
        if DROPOUT:
            keep = keep_mask(a[:, None], b[:, None], key_terms(key, head_term)[None, :], threshold)
            weight = zero_dropped(keep, weight, keep_scale)
        vv = load_rows(v, v_token, key, length, K, BLOCK_K)
        acc = dot(weight.to(vv.dtype), vv, acc * rescale[:, None])
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["tokens", "threshold"])
def forward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, cu_seqlens, seed0, seed1, site, head_offset, threshold, keep_scale, tokens,
    q_token, q_head, k_token, k_head, v_token, v_head,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    out_token = tl.num_programs(1) * K
    seq_start = tl.load(cu_seqlens + sequence).to(tl.int64)
    out += seq_start * out_token + head * K
    lse += head.to(tl.int64) * tokens + seq_start
    if sequence == tl.num_programs(2) - 1:
        rows, step = (tokens - seq_start).to(tl.int32), tl.num_programs(0) * M
        zero_rows(out, out_token, block * M, rows, step, M, K, BLOCK_K)
        zero_rows(lse, 1, block * M, rows, step, M, 1, 1)
        return
    if CAUSAL:  # late blocks have the most work, so they start first
        block = tl.num_programs(0) - 1 - block
    start_row = block * M
    length = (tl.load(cu_seqlens + sequence + 1) - seq_start).to(tl.int32)
    if start_row >= length:
        return
    query = start_row + tl.arange(0, M)
    qq = load_rows(q + seq_start * q_token + head * q_head, q_token, query, length, K, BLOCK_K)
    k += seq_start * k_token + head // R * k_head
    v += seq_start * v_token + head // R * v_head
    a, b, head_term = query, query, head
    if DROPOUT:
        a, b = query_seeds(seed0 + seq_start, seed1 + seq_start, tl.load(site), tl.minimum(query, length - 1))
        head_term = head_bits(head_offset, head)
    acc = tl.zeros((M, BLOCK_K), tl.float32)
    row_max = tl.full((M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((M,), tl.float32)
    unmasked_end, end = key_ranges(start_row, length, CAUSAL, M, N)
    begin = 0
    if WINDOW:
        begin = window_start(start_row, WINDOW, N)
        unmasked_end = begin
    acc, row_max, row_sum = _forward_over_keys(
        acc, row_max, row_sum, qq, k, v, k_token, v_token, begin, unmasked_end, length, query, a, b, head_term,
        threshold, keep_scale, False, CAUSAL, DROPOUT, SCALE, SOFT_CAP, WINDOW, N, K, BLOCK_K,
    )  # fmt: skip
    acc, row_max, row_sum = _forward_over_keys(
        acc, row_max, row_sum, qq, k, v, k_token, v_token, unmasked_end, end, length, query, a, b, head_term,
        threshold, keep_scale, True, CAUSAL, DROPOUT, SCALE, SOFT_CAP, WINDOW, N, K, BLOCK_K,
    )  # fmt: skip
    store_rows(out, out_token, query, length, acc * (keep_scale / row_sum)[:, None], K, BLOCK_K)
    tl.store(lse + query, row_max + tl.log2(row_sum), mask=query < length)

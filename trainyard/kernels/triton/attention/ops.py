"""Attention over packed sequences, with dropout whose mask is a function of global indices.

No framework's kernel draws our mask, and to read one from memory costs more than attention itself. Here the random bits
are made where the scores are. Sequences lie one after the other, so that padding costs nothing.

- forward: a program has a block of queries of one head, and meets the keys block by block.
- backward, sequences that fit one block, each head with keys of its own, small heads: a program has a sequence and a
  head, and makes all three gradients, so that scores and bits are made once.
- backward otherwise: a kernel for dq, then one for dk and dv. No two programs add to one number, so that results do not
  depend on their order.

Integer steps cost the most: some 17 for each bit, while tensor cores make its score in passing. So factors are taken
out of the loops, and blocks that need no mask have a loop of their own.

The last program in the dim of sequences stands for the tokens after them (filler up to a round N): it writes zeros.

Shapes: N tokens, S sequences, H heads, G kv heads, R heads per kv head, K head size; in kernels, blocks of M queries
and N keys. Exponents and log-sum-exps (lse) are to the base 2.
"""

from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainyard.core.counter_rng import element_bits
from trainyard.kernels.reference import AttentionDropout
from trainyard.kernels.triton.rng import mix32

IN_INTERPRETER = tl.constexpr(triton.knobs.runtime.interpret)
FUSED_BACKWARD_MAX_HEAD_DIM = 64
"""The largest head size for which one kernel makes all gradients. Triton 3.6 was seen to compile transposed products
wrongly (gradients several times too large, or reads past the end of shared memory) for larger heads, and for blocks of
64 queries by 32 keys. What is left is tested for ten head sizes."""
LOG2_E = tl.constexpr(1.4426950408889634)


class BlockSizes(NamedTuple):
    """How a kernel is cut up."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """The most for a thread. At 128, 16 warps fit on a multiprocessor at once: one computes while another waits."""


def block_sizes(
    kernel: Literal["forward", "alone", "dq", "dkdv"], K: int, R: int, max_seqlen: int, bf16: bool
) -> BlockSizes:
    """The sizes for a kernel, head size and longest sequence. `alone` is `_dq` where it makes all gradients.

    Chosen so that loops of usual models spill next to no registers on sm_90 (by ptxas, not by the clock). Small blocks
    leave room for a second program on a multiprocessor: while one waits for products, the other makes random bits.
    """
    if not bf16:  # products without tensor cores hold whole operands in registers: for tests, not for speed
        return BlockSizes(32, 32, 8, 1) if K <= 64 else BlockSizes(16, 16, 8, 1)
    narrow = K <= 64
    if kernel == "forward" and narrow:
        return BlockSizes(64, 32, 4, 3, 96) if max_seqlen <= 128 else BlockSizes(128, 64, 8, 3, 128)
    if kernel == "forward":
        return BlockSizes(128, 32, 8, 3, 128) if K <= 128 else BlockSizes(128, 32, 8, 2)
    if kernel == "alone":
        return BlockSizes(128, 32, 8, 1, 128)
    if kernel == "dq":
        return BlockSizes(128, 32, 8, 2, 128 if K <= 128 else None)
    return BlockSizes(32, 128 if K <= 128 else 64, 8, 2, 128 if narrow and R == 1 else None)


@triton.jit
def _dot(a, b, acc=None):  # type: ignore[no-untyped-def]
    if IN_INTERPRETER:  # the interpreter would multiply the bits of bf16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _keep_mask(a, b, column, threshold):  # type: ignore[no-untyped-def]
    """Whether a weight stays: by `random.cell32` of words from `_rows` and `_columns`, which broadcast."""
    return (mix32((a + column) ^ b) & 0x7FFFFFFF).to(tl.int32) >= threshold


@triton.jit
def _query_seeds(first, second, site, query):  # type: ignore[no-untyped-def]
    """The words of queries, with the part of the site (a number here) that is theirs."""
    a, b = tl.load(first + query).to(tl.uint32), tl.load(second + query).to(tl.uint32)
    return a, b + site.to(tl.uint32) * 0x7F4A7C15


@triton.jit
def _head_term(first_head, head):  # type: ignore[no-untyped-def]
    """What `_columns` adds for a head: made before the loop over keys."""
    return (tl.load(first_head) + head).to(tl.uint32) * 0x10001 * 0x9E3779B9


@triton.jit
def _key_terms(key, head_word):  # type: ignore[no-untyped-def]
    """The words of keys, which are numbered within their sequence, as a head sees them."""
    return key.to(tl.uint32) * 0x9E3779B9 + head_word


@triton.jit
def _bounds_mask(row, length, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    inside = row[:, None] < length
    if K < BLOCK_K:
        inside = inside & (tl.arange(0, BLOCK_K)[None, :] < K)
    return inside


@triton.jit
def _load_rows(x, stride, row, length, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of a sequence and head, zeros beyond its end whatever memory holds there."""
    at = x + row[:, None] * stride + tl.arange(0, BLOCK_K)[None, :]
    return tl.load(at, mask=_bounds_mask(row, length, K, BLOCK_K), other=0.0)


@triton.jit
def _store_rows(x, stride, row, length, value, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    at = x + row[:, None] * stride + tl.arange(0, BLOCK_K)[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=_bounds_mask(row, length, K, BLOCK_K))


@triton.jit
def _zero_rows(x, stride, low, high, step, ROWS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros in blocks of rows, one of every `step` rows, up to the row `high`."""
    for start in range(low, high, step):
        row = start + tl.arange(0, ROWS)
        _store_rows(x, stride, row, high, tl.zeros((ROWS, BLOCK_K), tl.float32), K, BLOCK_K)


@triton.jit
def _zero_dropped(keep, weight, kept):  # type: ignore[no-untyped-def]
    """Zero what is not kept. `kept - kept` is a zero that the compiler does not know: with one that it does, it chooses
    after the conversion to bf16, on halves of registers, by more instructions (Triton 3.6)."""
    return tl.where(keep, weight, kept - kept)


@triton.jit
def _key_ranges(low, length, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Up to where all of M queries from `low` on see whole blocks of N keys, and up to where they see any."""
    if CAUSAL:
        return low, tl.minimum(low + M, length)
    return length // N * N, length


@triton.jit
def _mask_scores(score, query, key, length, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores in blocks that are not seen whole. Keys beyond the end are after all queries that count."""
    if CAUSAL:
        return tl.where(query[:, None] >= key[None, :], score, float("-inf"))
    return score + tl.where(key < length, 0.0, float("-inf"))[None, :]


@triton.jit
def _forward_over_keys(  # type: ignore[no-untyped-def]
    acc, top, total, q, k, v, k_token, v_token, low, high, length, query, a, b, word, threshold, kept,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys low .. high: weighted sum of values, largest score and sum of weights so far."""
    scale: tl.constexpr = LOG2_E * K**-0.5
    for start in range(low, high, N):
        key = start + tl.arange(0, N)
        kk = _load_rows(k, k_token, key, length, K, BLOCK_K)
        score = _dot(q, tl.trans(kk))
        if MASK:
            score = _mask_scores(score, query, key, length, CAUSAL)
        new_top = tl.maximum(top, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weight, 1)
        top = new_top
        if DROPOUT:
            weight = _zero_dropped(
                _keep_mask(a[:, None], b[:, None], _key_terms(key, word)[None, :], threshold), weight, kept
            )
        vv = _load_rows(v, v_token, key, length, K, BLOCK_K)
        acc = _dot(weight.to(vv.dtype), vv, acc * fade[:, None])
    return acc, top, total


@triton.jit(do_not_specialize=["tokens", "threshold"])
def _forward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, starts, first, second, site, first_head, threshold, kept, tokens,
    q_token, q_head, k_token, k_head, v_token, v_head,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    out_token = tl.num_programs(1) * K
    begin = tl.load(starts + sequence).to(tl.int64)
    out += begin * out_token + head * K
    lse += head.to(tl.int64) * tokens + begin
    if sequence == tl.num_programs(2) - 1:
        rows, step = (tokens - begin).to(tl.int32), tl.num_programs(0) * M
        _zero_rows(out, out_token, block * M, rows, step, M, K, BLOCK_K)
        _zero_rows(lse, 1, block * M, rows, step, M, 1, 1)
        return
    if CAUSAL:  # late blocks have the most work: they go first
        block = tl.num_programs(0) - 1 - block
    low = block * M
    length = (tl.load(starts + sequence + 1) - begin).to(tl.int32)
    if low >= length:
        return
    query = low + tl.arange(0, M)
    qq = _load_rows(q + begin * q_token + head * q_head, q_token, query, length, K, BLOCK_K)
    k += begin * k_token + head // R * k_head
    v += begin * v_token + head // R * v_head
    a, b, word = query, query, head
    if DROPOUT:
        a, b = _query_seeds(first + begin, second + begin, tl.load(site), tl.minimum(query, length - 1))
        word = _head_term(first_head, head)
    acc = tl.zeros((M, BLOCK_K), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    whole, end = _key_ranges(low, length, CAUSAL, M, N)
    acc, top, total = _forward_over_keys(
        acc, top, total, qq, k, v, k_token, v_token, 0, whole, length, query, a, b, word, threshold, kept,
        False, CAUSAL, DROPOUT, N, K, BLOCK_K,
    )  # fmt: skip
    acc, top, total = _forward_over_keys(
        acc, top, total, qq, k, v, k_token, v_token, whole, end, length, query, a, b, word, threshold, kept,
        True, CAUSAL, DROPOUT, N, K, BLOCK_K,
    )  # fmt: skip
    _store_rows(out, out_token, query, length, acc * (kept / total)[:, None], K, BLOCK_K)
    tl.store(lse + query, top + tl.log2(total), mask=query < length)


@triton.jit
def _dq_over_keys(  # type: ignore[no-untyped-def]
    dq, q, dout, lse, delta, k, v, dk, dv, k_token, v_token, dk_token, low, high, length, query, a, b, word, threshold,
    kept, MASK: tl.constexpr, ALONE: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What the keys low .. high add to dq, and where these are all their queries, dk and dv."""
    scale: tl.constexpr = LOG2_E * K**-0.5
    for start in range(low, high, N):
        key = start + tl.arange(0, N)
        kk = _load_rows(k, k_token, key, length, K, BLOCK_K)
        vv = _load_rows(v, v_token, key, length, K, BLOCK_K)
        score = _dot(q, tl.trans(kk))
        dweight = _dot(dout, tl.trans(vv))
        score = score * scale - lse[:, None]
        if MASK:
            score = _mask_scores(score, query, key, length, CAUSAL)
        weight = tl.exp2(score)
        left = weight
        if DROPOUT:
            keep = _keep_mask(a[:, None], b[:, None], _key_terms(key, word)[None, :], threshold)
            left = _zero_dropped(keep, weight, kept)
            dweight = _zero_dropped(keep, dweight, kept)
        dscore = (weight * (dweight - delta[:, None])).to(q.dtype)
        dq = _dot(dscore, kk, dq)
        if ALONE:  # transposed products take weights from shared memory as they are
            dvv = tl.trans(_dot(tl.trans(dout), left.to(q.dtype)))
            dkk = tl.trans(_dot(tl.trans(q), dscore))
            _store_rows(dv, dk_token, key, length, dvv * kept, K, BLOCK_K)
            _store_rows(dk, dk_token, key, length, dkk * (kept * K**-0.5), K, BLOCK_K)
    return dq


@triton.jit(do_not_specialize=["tokens", "threshold"])
def _dq_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, dout, dq, dk, dv, delta, starts, first, second, site, first_head, threshold, kept, tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, dout_token, dout_head, d_token,
    ALONE: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries. `ALONE`, with no other queries of their keys, dk and dv too; else, for `_dkdv`, delta:
    the sum of out * dout, [H, N]."""
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    out_token = tl.num_programs(1) * K
    begin = tl.load(starts + sequence).to(tl.int64)
    here, there = begin * out_token + head * K, begin * d_token + head * K
    if sequence == tl.num_programs(2) - 1:
        rows, step = (tokens - begin).to(tl.int32), tl.num_programs(0) * M
        _zero_rows(dq + there, d_token, block * M, rows, step, M, K, BLOCK_K)
        if ALONE:
            _zero_rows(dk + there, d_token, block * M, rows, step, M, K, BLOCK_K)
            _zero_rows(dv + there, d_token, block * M, rows, step, M, K, BLOCK_K)
        return
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block
    low = block * M
    length = (tl.load(starts + sequence + 1) - begin).to(tl.int32)
    if low >= length:
        return
    query = low + tl.arange(0, M)
    qq = _load_rows(q + begin * q_token + head * q_head, q_token, query, length, K, BLOCK_K)
    dd = _load_rows(dout + begin * dout_token + head * dout_head, dout_token, query, length, K, BLOCK_K)
    oo = _load_rows(out + here, out_token, query, length, K, BLOCK_K)
    at = head.to(tl.int64) * tokens + begin + query
    # Queries beyond the end are zeros with zero gradients: whatever their weights, they add nothing.
    lse_M = tl.load(lse + at, mask=query < length, other=0.0)
    delta_M = tl.sum(oo.to(tl.float32) * dd.to(tl.float32), 1) / kept
    if not ALONE:
        tl.store(delta + at, delta_M, mask=query < length)
    k += begin * k_token + head // R * k_head
    v += begin * v_token + head // R * v_head
    a, b, word = query, query, head
    if DROPOUT:
        a, b = _query_seeds(first + begin, second + begin, tl.load(site), tl.minimum(query, length - 1))
        word = _head_term(first_head, head)
    whole, end = _key_ranges(low, length, CAUSAL, M, N)
    dqq = tl.zeros((M, BLOCK_K), tl.float32)
    dqq = _dq_over_keys(
        dqq, qq, dd, lse_M, delta_M, k, v, dk + there, dv + there, k_token, v_token, d_token, 0, whole, length, query,
        a, b, word, threshold, kept, False, ALONE, CAUSAL, DROPOUT, N, K, BLOCK_K,
    )  # fmt: skip
    dqq = _dq_over_keys(
        dqq, qq, dd, lse_M, delta_M, k, v, dk + there, dv + there, k_token, v_token, d_token, whole, end, length, query,
        a, b, word, threshold, kept, True, ALONE, CAUSAL, DROPOUT, N, K, BLOCK_K,
    )  # fmt: skip
    _store_rows(dq + there, d_token, query, length, dqq * (kept * K**-0.5), K, BLOCK_K)


@triton.jit
def _dkdv_over_queries(  # type: ignore[no-untyped-def]
    dk, dv, k, v, q, dout, lse, delta, q_token, dout_token, low, high, length, key, first, second, site, column,
    threshold, kept, MASK: tl.constexpr, DROPOUT: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What the queries low .. high add to dk and dv. Scores are [keys, queries], as these products take them."""
    scale: tl.constexpr = LOG2_E * K**-0.5
    for start in range(low, high, M):
        query = start + tl.arange(0, M)
        qq = _load_rows(q, q_token, query, length, K, BLOCK_K)
        dd = _load_rows(dout, dout_token, query, length, K, BLOCK_K)
        # Queries beyond the end have weights 0. Keys beyond it make rows of garbage, which are not stored.
        near = tl.minimum(query, length - 1)
        lse_M = tl.where(query < length, tl.load(lse + near), float("inf"))
        delta_M = tl.load(delta + near)
        score = _dot(k, tl.trans(qq))
        dweight = _dot(v, tl.trans(dd))
        weight = tl.exp2(score * scale - lse_M[None, :])
        if MASK:
            weight = tl.where(query[None, :] >= key[:, None], weight, 0.0)
        left = weight
        if DROPOUT:
            a, b = _query_seeds(first, second, site, near)
            keep = _keep_mask(a[None, :], b[None, :], column[:, None], threshold)
            left = _zero_dropped(keep, weight, kept)
            dweight = _zero_dropped(keep, dweight, kept)
        dscore = (weight * (dweight - delta_M[None, :])).to(qq.dtype)
        dv = _dot(left.to(dd.dtype), dd, dv)
        dk = _dot(dscore, qq, dk)
    return dk, dv


@triton.jit(do_not_specialize=["tokens", "threshold"])
def _dkdv_kernel(  # type: ignore[no-untyped-def]
    q, k, v, lse, dout, delta, dk, dv, starts, first, second, site, first_head, threshold, kept, tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, dout_token, dout_head, d_token,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    block, kv, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts + sequence).to(tl.int64)
    dk += begin * d_token + kv * K
    dv += begin * d_token + kv * K
    low = block * N
    if sequence == tl.num_programs(2) - 1:
        rows, step = (tokens - begin).to(tl.int32), tl.num_programs(0) * N
        _zero_rows(dk, d_token, low, rows, step, N, K, BLOCK_K)
        _zero_rows(dv, d_token, low, rows, step, N, K, BLOCK_K)
        return
    length = (tl.load(starts + sequence + 1) - begin).to(tl.int32)
    if low >= length:
        return
    key = low + tl.arange(0, N)
    kk = _load_rows(k + begin * k_token + kv * k_head, k_token, key, length, K, BLOCK_K)
    vv = _load_rows(v + begin * v_token + kv * v_head, v_token, key, length, K, BLOCK_K)
    q += begin * q_token
    dout += begin * dout_token
    number = begin
    if DROPOUT:
        first += begin
        second += begin
        number = tl.load(site)
    dkk = tl.zeros((N, BLOCK_K), tl.float32)
    dvv = tl.zeros((N, BLOCK_K), tl.float32)
    for r in range(R):
        head = kv * R + r
        at = head.to(tl.int64) * tokens + begin
        column = key
        if DROPOUT:
            column = _key_terms(key, _head_term(first_head, head))
        rest = 0
        if CAUSAL:
            rest = tl.minimum(low + N, length)
            dkk, dvv = _dkdv_over_queries(
                dkk, dvv, kk, vv, q + head * q_head, dout + head * dout_head, lse + at, delta + at, q_token, dout_token,
                low, rest, length, key, first, second, number, column, threshold, kept, True, DROPOUT, M, K, BLOCK_K,
            )  # fmt: skip
        dkk, dvv = _dkdv_over_queries(
            dkk, dvv, kk, vv, q + head * q_head, dout + head * dout_head, lse + at, delta + at, q_token, dout_token,
            rest, length, length, key, first, second, number, column, threshold, kept, False, DROPOUT, M, K, BLOCK_K,
        )  # fmt: skip
    _store_rows(dk, d_token, key, length, dkk * (kept * K**-0.5), K, BLOCK_K)
    _store_rows(dv, d_token, key, length, dvv * kept, K, BLOCK_K)


@torch.library.custom_op("trainyard::attend_packed", mutates_args=())
def varlen_attention_forward(
    qkv: Tensor,
    starts: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    site: Tensor | None,
    first_head: Tensor | None,
    heads: int,
    kv: int,
    p: float,
    longest: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Output, and the log-sum-exp of scores, [H, N]. The four tensors of `Drops` come together or not at all."""
    q, k, v = _split_qkv(_last_dim_contiguous(qkv), heads, kv)
    N, H, K = q.shape
    out, lse = q.new_empty((N, H, K)), q.new_empty((H, N), dtype=torch.float32)
    size = block_sizes("forward", K, heads // kv, longest, q.dtype == torch.bfloat16)
    _forward_kernel[(triton.cdiv(max(longest, 1), size.queries), H, starts.numel())](
        q, k, v, out, lse, starts, first, second, site, first_head, _threshold(p), 1 / (1 - p), N,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        CAUSAL=causal, DROPOUT=first is not None, R=heads // kv, K=K, BLOCK_K=_padded_head_dim(K), **_launch_options(size),
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("trainyard::attend_packed_backward", mutates_args=())
def varlen_attention_backward(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    site: Tensor | None,
    first_head: Tensor | None,
    heads: int,
    kv: int,
    p: float,
    longest: int,
    causal: bool,
) -> Tensor:
    """The gradient of qkv, whose parts are written where they belong."""
    dout = _last_dim_contiguous(dout)
    q, k, v = _split_qkv(_last_dim_contiguous(qkv), heads, kv)
    (N, H, K), R, S = q.shape, heads // kv, starts.numel()
    d_qkv = qkv.new_empty(qkv.shape)
    dq, dk, dv = _split_qkv(d_qkv, heads, kv)
    words = (starts, first, second, site, first_head, _threshold(p), 1 / (1 - p), N)
    strides = [step for x in (q, k, v, dout) for step in x.stride()[:2]] + [dq.stride(0)]
    fixed = {"CAUSAL": causal, "DROPOUT": first is not None, "R": R, "K": K, "BLOCK_K": _padded_head_dim(K)}
    bf16 = q.dtype == torch.bfloat16
    size = block_sizes("alone", K, R, longest, bf16)
    alone = R == 1 and K <= FUSED_BACKWARD_MAX_HEAD_DIM and longest <= size.queries
    if not alone:
        size = block_sizes("dq", K, R, longest, bf16)
    delta = torch.empty_like(lse)
    grid = triton.cdiv(max(longest, 1), size.queries), H, S
    _dq_kernel[grid](
        q, k, v, out, lse, dout, dq, dk, dv, delta, *words, *strides, ALONE=alone, **fixed, **_launch_options(size)
    )
    if not alone:
        size = block_sizes("dkdv", K, R, longest, bf16)
        grid = triton.cdiv(max(longest, 1), size.keys), kv, S
        _dkdv_kernel[grid](q, k, v, lse, dout, delta, dk, dv, *words, *strides, **fixed, **_launch_options(size))
    return d_qkv


def _split_qkv(qkv: Tensor, heads: int, kv: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views [N, H, K], [N, G, K] and [N, G, K]."""
    x = qkv.view(len(qkv), heads + 2 * kv, -1)
    return x[:, :heads], x[:, heads : heads + kv], x[:, heads + kv :]


def _launch_options(size: BlockSizes) -> dict[str, int | None]:
    m, n, warps, stages, registers = size
    return {"M": m, "N": n, "num_warps": warps, "num_stages": stages, "maxnreg": registers}


def _last_dim_contiguous(x: Tensor) -> Tensor:
    """Kernels take any strides but for the last dim. A gradient may be an expanded scalar."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _threshold(p: float) -> int:
    return round(p * 2**31)


def _padded_head_dim(size: int) -> int:
    """The power of two, at least 16, that holds a size."""
    return max(16, triton.next_power_of_2(size))


@varlen_attention_forward.register_fake
def _(qkv: Tensor, _starts: Tensor, _1: Any, _2: Any, _3: Any, _4: Any, heads: int, kv: int, *_: Any) -> Any:
    tokens, width = qkv.shape  # not len(): a length that stands for many would become the one at hand
    return qkv.new_empty(tokens, heads, width // (heads + 2 * kv)), qkv.new_empty((heads, tokens), dtype=torch.float32)


@varlen_attention_backward.register_fake
def _(_dout: Tensor, qkv: Tensor, *_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, *words = inputs[:6]
    ctx.plain = inputs[6:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(qkv, *output, *words)


def _backward(ctx: Any, dout: Tensor, _dlse: None) -> tuple[Any, ...]:
    return varlen_attention_backward(dout, *ctx.saved_tensors, *ctx.plain), *[None] * 10


varlen_attention_forward.register_autograd(_backward, setup_context=_setup_context)


def varlen_attention(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    cu_seqlens: Tensor,
    max_seqlen: int,
    causal: bool,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """softmax(q k / sqrt(K)) v within each sequence. A row of qkv [N, (H + 2 G) K] has a token's queries of all heads,
    its keys and its values; gives [N, H, K].

    Sequence s has the tokens starts[s] .. starts[s + 1] - 1 (`starts`: int32 [S + 1], on the device), at most `longest`
    of them, perhaps none. Tokens after the last sequence get zeros, as their gradients do.
    """
    p, *words = dropout if dropout is not None and dropout.p > 0 else (0.0, None, None, None, None)
    assert 0 <= p < 1
    out, _ = varlen_attention_forward(qkv, cu_seqlens, *words, heads, kv_heads, p, max_seqlen, causal)
    return out


def varlen_attention_reference(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    cu_seqlens: Tensor,
    max_seqlen: int,
    causal: bool,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """What `attend` computes, in fp32 by whole matrices: what it is tested against."""
    q, k, v = _split_qkv(qkv, heads, kv_heads)
    (_, H, K), R = q.shape, heads // kv_heads
    ends = cu_seqlens.tolist()
    assert all(b - a <= max_seqlen for a, b in pairwise(ends))
    parts = []
    for a, b in pairwise(ends):
        q_HTK, k_HTK, v_HTK = (x[a:b].float().transpose(0, 1) for x in (q, k, v))
        k_HTK, v_HTK = k_HTK.repeat_interleave(R, 0), v_HTK.repeat_interleave(R, 0)
        score_HTT = q_HTK @ k_HTK.transpose(1, 2) * K**-0.5
        place_T = torch.arange(b - a, dtype=torch.int32, device=q.device)
        if causal:
            score_HTT = score_HTT.masked_fill(place_T[:, None] < place_T, -torch.inf)
        weight_HTT = score_HTT.softmax(-1)
        if dropout is not None:
            head_H = torch.arange(H, dtype=torch.int32, device=q.device) + dropout.head_offset
            column_H1T = (head_H * 0x10001)[:, None, None] + place_T
            row = dropout.seed0[a:b, None], dropout.seed1[a:b, None]
            bits = element_bits(row, dropout.site, column_H1T) & 0x7FFFFFFF
            weight_HTT = torch.where(bits >= round(dropout.p * 2**31), weight_HTT / (1 - dropout.p), 0.0)
        parts.append((weight_HTT @ v_HTK).transpose(0, 1))
    filler = torch.zeros_like(q[ends[-1] :], dtype=torch.float32)
    return torch.cat([*parts, filler]).to(q.dtype)

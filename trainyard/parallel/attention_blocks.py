"""Blocks of attention, some queries against some keys: which ones a rank computes, and how.

A block needs what scaled_dot_product_attention hides: the log-sum-exp of each query's scores going out, by which blocks
are merged, and in the backward pass the output and log-sum-exp over *all* keys coming in. torch's fused kernels give
that where they exist; documents are a bias to them, made a tile of queries at a time. Dropout, and what no fused kernel
takes, goes through the plain one below, a tile of scores at a time.

Shapes: B batch, H heads, G kv heads, R heads per kv head, T queries, S keys, K head size.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from trainyard import compat
from trainyard.core.counter_rng import DropoutRng, element_bits

TILE_BYTES = 64 << 20
"""No tile of biases or scores is larger, but for a single row of all heads. A few are held at a time."""
MASKED_SCORE = -6e4
"""Added to the score of a key that a query does not see; fits fp16. Its weight, exp of that, is 0 in fp32. A query that
sees no key of a block has no nan, but a log-sum-exp so low that merging and backward give the block the weight 0."""


class BlockMask(NamedTuple):
    """What else than the causal rule says which weights count, for the queries and keys of a block."""

    documents_BT: Tensor | None
    """Ids of the queries' documents: a query sees the keys with the same id."""
    documents_BS: Tensor | None
    dropout: DropoutRng | None
    key_positions_S: Tensor | None
    """The keys' places in the whole sequence (int32), by which dropout draws."""


class AttentionBlock(NamedTuple):
    """Which local queries meet which of the keys at hand."""

    queries: slice
    keys: slice
    causal: bool
    """Queries and keys are the same places, and a query sees none after its own."""
    is_first: bool
    """These queries have met no keys before."""


class ScoreTile(NamedTuple):
    batch: slice
    queries: slice
    keys: slice


def rank_token_positions(rank: int | Tensor, size: int, tokens: int, device: torch.device) -> Tensor:
    """Places in the whole sequence, int32, of the `tokens` that a rank holds."""
    if size == 1:
        return torch.arange(tokens, dtype=torch.int32, device=device)
    chunk = tokens // 2
    first = torch.arange(chunk, dtype=torch.int32, device=device)
    return torch.cat((first + rank * chunk, first + (2 * size - 1 - rank) * chunk))


def ring_block(source: int, rank: int, tokens: int, causal: bool) -> AttentionBlock:
    whole, half = slice(0, tokens), tokens // 2
    if not causal or source == rank:
        return AttentionBlock(whole, whole, causal, source == rank)
    if source < rank:
        return AttentionBlock(whole, slice(0, half), False, False)
    return AttentionBlock(slice(half, tokens), whole, False, False)


def gathered_blocks(rank: int, size: int, tokens: int, causal: bool) -> list[AttentionBlock]:
    """Each of the two chunks sees all chunks before it, and itself causally."""
    if not causal:
        return [AttentionBlock(slice(0, tokens), slice(0, size * tokens), False, True)]
    half, found = tokens // 2, []
    for top, chunk in ((0, rank), (half, 2 * size - 1 - rank)):
        rows, here = slice(top, top + half), chunk * half
        if chunk > 0:
            found.append(AttentionBlock(rows, slice(0, here), False, True))
        found.append(AttentionBlock(rows, slice(here, here + half), True, chunk == 0))
    return found


def to_natural_order(parts: Tensor, dim: int) -> Tensor:
    """[size, ...] of all ranks to the whole sequence in natural order; `dim` holds the tokens of a rank's part."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim)


def to_rank_order(x: Tensor, size: int, dim: int) -> Tensor:
    """The other way, for gradients: [size, ...]."""
    chunks = x.chunk(2 * size, dim)
    return torch.stack([torch.cat((chunks[r], chunks[-1 - r]), dim) for r in range(size)])


def forward(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, causal: bool, mask: BlockMask | None
) -> tuple[Tensor, Tensor]:
    """Output and fp32 log-sum-exp [B, H, T]."""
    kernel = _fused_kernel(q_BHTK, k_BGSK, causal, mask)
    if kernel and mask is None:
        return kernel.forward(q_BHTK, k_BGSK, v_BGSK, causal, None)
    out_BHTK = torch.empty(q_BHTK.shape, dtype=torch.float32, device=q_BHTK.device)
    lse_BHT = torch.empty(q_BHTK.shape[:3], dtype=torch.float32, device=q_BHTK.device)
    for tile in score_tiles(q_BHTK, k_BGSK, causal, kernel is None):
        q = q_BHTK[tile.batch, :, tile.queries]
        k, v = (x[tile.batch, :, tile.keys] for x in (k_BGSK, v_BGSK))
        bias_B1TS = _bias(tile, q, causal, mask)
        if kernel:
            out, lse = kernel.forward(q, k, v, False, bias_B1TS)
        else:
            score_BGRTS = _scores(q, k, bias_B1TS)
            lse_BGRT = score_BGRTS.logsumexp(-1)
            weight_BGRTS = score_BGRTS.sub_(lse_BGRT[..., None]).exp_()
            if mask and mask.dropout:
                weight_BGRTS *= _kept(tile, weight_BGRTS.shape, mask, mask.dropout)
            out, lse = _fp32_matmul(weight_BGRTS.flatten(2, 3).to(v.dtype), v).view(q.shape), lse_BGRT.flatten(1, 2)
        out_BHTK[tile.batch, :, tile.queries] = out
        lse_BHT[tile.batch, :, tile.queries] = lse
    return out_BHTK, lse_BHT


def backward(
    dout_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    out_BHTK: Tensor,
    lse_BHT: Tensor,
    causal: bool,
    mask: BlockMask | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of q, k and v. `out` and `lse` are those over all keys, of all blocks."""
    kernel = _fused_kernel(q_BHTK, k_BGSK, causal, mask)
    if kernel and mask is None:
        return kernel.backward(dout_BHTK, q_BHTK, k_BGSK, v_BGSK, out_BHTK, lse_BHT, causal, None)
    dq_BHTK, dk_BGSK, dv_BGSK = (
        torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q_BHTK, k_BGSK, v_BGSK)
    )
    for tile in score_tiles(q_BHTK, k_BGSK, causal, kernel is None):
        dout, q, out = (x[tile.batch, :, tile.queries] for x in (dout_BHTK, q_BHTK, out_BHTK))
        k, v = (x[tile.batch, :, tile.keys] for x in (k_BGSK, v_BGSK))
        lse = lse_BHT[tile.batch, :, tile.queries]
        bias_B1TS = _bias(tile, q, causal, mask)
        if kernel:
            dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, False, bias_B1TS)
        else:
            score_BGRTS = _scores(q, k, bias_B1TS)
            row_BGRT1 = (*score_BGRTS.shape[:4], 1)
            weight_BGRTS = used_BGRTS = score_BGRTS.sub_(lse.reshape(row_BGRT1)).exp_()
            dout = _group_heads(dout, k)
            dweight_BGRTS = _fp32_matmul(dout, v.transpose(2, 3)).view_as(weight_BGRTS)
            if mask and mask.dropout:
                kept_BGRTS = _kept(tile, weight_BGRTS.shape, mask, mask.dropout)
                used_BGRTS = weight_BGRTS * kept_BGRTS
                dweight_BGRTS *= kept_BGRTS
            # The softmax takes off each row's mean gradient, sum(weight * dweight), which is dout . out.
            mean_BGRT1 = (dout.float() * _group_heads(out, k).float()).sum(-1).view(row_BGRT1)
            dscore = (weight_BGRTS * (dweight_BGRTS - mean_BGRT1) * q.shape[-1] ** -0.5).flatten(2, 3).to(k.dtype)
            dq = _fp32_matmul(dscore, k).view(q.shape)
            dk = _fp32_matmul(dscore.transpose(2, 3), _group_heads(q, k))
            dv = _fp32_matmul(used_BGRTS.flatten(2, 3).to(v.dtype).transpose(2, 3), dout)
        dq_BHTK[tile.batch, :, tile.queries] = dq
        dk_BGSK[tile.batch, :, tile.keys] += dk
        dv_BGSK[tile.batch, :, tile.keys] += dv
    return dq_BHTK, dk_BGSK, dv_BGSK


def score_tiles(q_BHTK: Tensor, k_BGSK: Tensor, causal: bool, with_scores: bool) -> Iterator[ScoreTile]:
    """Cut queries x keys so that a tile of fp32 scores [B, H, T, S], or else of biases [B, 1, T, S], fits TILE_BYTES:
    whole samples while they do, then rows of one. Keys that come after all of a tile's queries are left off."""
    (batch, heads, queries, _), keys = q_BHTK.shape, k_BGSK.shape[2]
    assert queries == keys or not causal
    limit = TILE_BYTES // (keys * (4 * heads if with_scores else q_BHTK.element_size()))
    samples = min(batch, max(1, limit // queries))
    rows = max(1, limit // samples)
    for first in range(0, batch, samples):
        for top in range(0, queries, rows):
            bottom = min(top + rows, queries)
            yield ScoreTile(slice(first, first + samples), slice(top, bottom), slice(0, bottom if causal else keys))


def _fused_kernel(q: Tensor, k: Tensor, causal: bool, pairs: BlockMask | None) -> compat.AttentionKernel | None:
    if pairs is None:
        return compat.select_attention_kernel(q, k, causal, False)
    return None if pairs.dropout else compat.select_attention_kernel(q, k, False, True)


def _bias(tile: ScoreTile, q: Tensor, causal: bool, pairs: BlockMask | None) -> Tensor | None:
    """What to add to the scores of a tile, in the dtype of queries."""
    hidden: Tensor | None = None
    if pairs and pairs.documents_BT is not None and pairs.documents_BS is not None:
        mine_BT, theirs_BS = pairs.documents_BT[tile.batch, tile.queries], pairs.documents_BS[tile.batch, tile.keys]
        hidden = (mine_BT[:, :, None] != theirs_BS[:, None])[:, None]
    if causal:
        rows, keys = (torch.arange(part.start, part.stop, device=q.device) for part in (tile.queries, tile.keys))
        future = (keys > rows[:, None])[None, None]
        hidden = future if hidden is None else hidden.logical_or_(future)
    return (
        None
        if hidden is None
        else torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, MASKED_SCORE)
    )


def _scores(q: Tensor, k: Tensor, bias_B1TS: Tensor | None) -> Tensor:
    """fp32 [B, G, R, T, S]."""
    (B, _, T, K), (_, G, S, _) = q.shape, k.shape
    score_BGRTS = _fp32_matmul(_group_heads(q, k), k.transpose(2, 3)).mul_(K**-0.5).view(B, G, -1, T, S)
    return score_BGRTS if bias_B1TS is None else score_BGRTS.add_(bias_B1TS[:, :, None])


def _kept(tile: ScoreTile, shape: torch.Size, pairs: BlockMask, dropout: DropoutRng) -> Tensor:
    """1 / (1 - p) where a weight stays and 0 where it is dropped. A weight is numbered by its query's random words, and
    by head and key place within that row, so that no layout changes which ones are dropped."""
    assert pairs.key_positions_S is not None
    _, groups, repeat, _, _ = shape
    head_H = torch.arange(groups * repeat, dtype=torch.int32, device=pairs.key_positions_S.device) + dropout.head_offset
    column_GR1S = head_H.view(groups, repeat, 1, 1) * 0x10001 + pairs.key_positions_S[tile.keys]
    first, second = (x[tile.batch, None, None, tile.queries, None] for x in (dropout.seed0, dropout.seed1))
    bits = element_bits((first, second), dropout.site, column_GR1S) & 0x7FFFFFFF
    return (bits >= round(dropout.p * 2**31)).float().div_(1 - dropout.p)


def _group_heads(x_BHTK: Tensor, k_BGSK: Tensor) -> Tensor:
    """[B, H, T, K] to [B, G, R * T, K]: heads that share keys become rows of one product, so keys are not repeated."""
    B, _, _, K = x_BHTK.shape
    return x_BHTK.reshape(B, k_BGSK.shape[1], -1, K)


def _fp32_matmul(a: Tensor, b: Tensor) -> Tensor:
    """[B, G, m, k] @ [B, G, k, n] in fp32: rounded to the inputs' dtype, scores would be wrong by percents."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), torch.float32).view(*a.shape[:3], -1)
    return a.float() @ b.float()

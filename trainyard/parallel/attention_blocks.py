"""Attention blocks: a range of queries against a range of keys, which ones a rank computes, and how.

Blocks need what scaled_dot_product_attention hides: forward returns the log-sum-exp of each query's scores, by which
blocks are merged, and backward takes the output and log-sum-exp over *all* keys. torch's fused kernels provide that
where they exist; document masks become a bias, made for one tile of queries at a time. Dropout, and inputs that no
fused kernel takes (a soft-cap), use the unfused code below, one tile of scores at a time. Sinks are added once all
blocks are merged, for which the output and the log-sum-exp suffice; with these two, backward of a block is right as it
is.

Shapes: B batch, H heads, G kv heads, R heads per kv head, T queries, S keys, K head size, V width of values.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from trainyard import compat
from trainyard.core.counter_rng import DropoutRng, element_bits
from trainyard.kernels.reference import AttentionScores

TILE_BYTES = 64 << 20
"""Upper bound of a tile of biases or scores, though a tile has at least one query. A few tiles are alive at a time."""
MASKED_SCORE = -6e4
"""Added to the score of a masked key; fits fp16, and exp of it is 0 in fp32. A query that sees no key of a block yields
no nan but a log-sum-exp so low that merging and backward give the block weight 0."""


class BlockMask(NamedTuple):
    """Document mask, sliding window and dropout for the queries and keys of a block, on top of the causal mask."""

    documents_BT: Tensor | None
    """Document ids of the queries: a query sees the keys with the same id."""
    documents_BS: Tensor | None
    dropout: DropoutRng | None
    key_positions_S: Tensor | None
    """Global positions of the keys (int32), from which window and dropout mask are derived."""
    query_positions_T: Tensor | None = None
    window: int = 0
    """A query sees no key that is this many tokens earlier; 0: no limit."""


class AttentionBlock(NamedTuple):
    """A range of local queries and the range of available keys they attend to."""

    queries: slice
    keys: slice
    causal: bool
    """Queries and keys have the same positions, and a query sees no later key."""
    is_first: bool
    """No earlier block had these queries, so that there is nothing to merge with."""


class ScoreTile(NamedTuple):
    """The part of a block that is computed at a time."""

    batch: slice
    queries: slice
    keys: slice


def rank_token_positions(rank: int | Tensor, size: int, tokens: int, device: torch.device) -> Tensor:
    """Global positions, int32, of the `tokens` tokens that a rank holds."""
    if size == 1:
        return torch.arange(tokens, dtype=torch.int32, device=device)
    chunk = tokens // 2
    offset = torch.arange(chunk, dtype=torch.int32, device=device)
    return torch.cat((offset + rank * chunk, offset + (2 * size - 1 - rank) * chunk))


def ring_block(source: int, rank: int, tokens: int, causal: bool) -> AttentionBlock:
    """The block of a rank's queries with the keys of rank `source`."""
    every, half = slice(0, tokens), tokens // 2
    if not causal or source == rank:
        return AttentionBlock(every, every, causal, source == rank)
    if source < rank:
        return AttentionBlock(every, slice(0, half), False, False)
    return AttentionBlock(slice(half, tokens), every, False, False)


def gathered_blocks(rank: int, size: int, tokens: int, causal: bool) -> list[AttentionBlock]:
    """The blocks of a rank with all keys in natural order: each of its two chunks sees all earlier chunks, and itself
    causally."""
    if not causal:
        return [AttentionBlock(slice(0, tokens), slice(0, size * tokens), False, True)]
    half, blocks = tokens // 2, []
    for top, chunk in ((0, rank), (half, 2 * size - 1 - rank)):
        queries, start = slice(top, top + half), chunk * half
        if chunk > 0:
            blocks.append(AttentionBlock(queries, slice(0, start), False, True))
        blocks.append(AttentionBlock(queries, slice(start, start + half), True, chunk == 0))
    return blocks


def to_natural_order(parts: Tensor, dim: int) -> Tensor:
    """[size, ...] of all ranks to the full sequence in natural order; `dim` is the token dim of one rank's tensor."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim)


def to_rank_order(x: Tensor, size: int, dim: int) -> Tensor:
    """The inverse of `to_natural_order`, for gradients: [size, ...]."""
    chunks = x.chunk(2 * size, dim)
    return torch.stack([torch.cat((chunks[r], chunks[-1 - r]), dim) for r in range(size)])


def forward(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, causal: bool, mask: BlockMask | None, scores: AttentionScores
) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, V] and fp32 log-sum-exp [B, H, T] of a block, without sinks."""
    kernel, scale = _fused_kernel(q_BHTK, k_BGSK, v_BGSV, causal, mask, scores), scores.scale_of(q_BHTK.shape[3])
    if kernel and mask is None:
        return kernel.forward(q_BHTK, k_BGSK, v_BGSV, causal, None, scale)
    B, H, T, _ = q_BHTK.shape
    out_BHTV = torch.empty((B, H, T, v_BGSV.shape[3]), dtype=torch.float32, device=q_BHTK.device)
    lse_BHT = torch.empty((B, H, T), dtype=torch.float32, device=q_BHTK.device)
    for tile in score_tiles(q_BHTK, k_BGSK, causal, kernel is None, mask.window if mask else 0):
        q = q_BHTK[tile.batch, :, tile.queries]
        k, v = (x[tile.batch, :, tile.keys] for x in (k_BGSK, v_BGSV))
        bias_B1TS = _bias(tile, q, causal, mask)
        if kernel:
            out, lse = kernel.forward(q, k, v, False, bias_B1TS, scale)
        else:
            score_BGRTS = _hide(_scores(q, k, scores), bias_B1TS)
            lse_BGRT = score_BGRTS.logsumexp(-1)
            weight_BGRTS = score_BGRTS.sub_(lse_BGRT[..., None]).exp_()
            if mask and mask.dropout:
                weight_BGRTS *= _dropout_scale(tile, weight_BGRTS.shape, mask, mask.dropout)
            out = _fp32_matmul(weight_BGRTS.flatten(2, 3).to(v.dtype), v).view(*q.shape[:3], -1)
            lse = lse_BGRT.flatten(1, 2)
        out_BHTV[tile.batch, :, tile.queries] = out
        lse_BHT[tile.batch, :, tile.queries] = lse
    return out_BHTV, lse_BHT


def backward(
    dout_BHTV: Tensor,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    out_BHTV: Tensor,
    lse_BHT: Tensor,
    causal: bool,
    mask: BlockMask | None,
    scores: AttentionScores,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's share of the gradients of q, k and v. `out` and `lse` are those over the keys of all blocks, and
    over the sinks."""
    kernel, scale = _fused_kernel(q_BHTK, k_BGSK, v_BGSV, causal, mask, scores), scores.scale_of(q_BHTK.shape[3])
    if kernel and mask is None:
        return kernel.backward(dout_BHTV, q_BHTK, k_BGSK, v_BGSV, out_BHTV, lse_BHT, causal, None, scale)
    dq_BHTK, dk_BGSK, dv_BGSV = (
        torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q_BHTK, k_BGSK, v_BGSV)
    )
    for tile in score_tiles(q_BHTK, k_BGSK, causal, kernel is None, mask.window if mask else 0):
        dout, q, out = (x[tile.batch, :, tile.queries] for x in (dout_BHTV, q_BHTK, out_BHTV))
        k, v = (x[tile.batch, :, tile.keys] for x in (k_BGSK, v_BGSV))
        lse = lse_BHT[tile.batch, :, tile.queries]
        bias_B1TS = _bias(tile, q, causal, mask)
        if kernel:
            dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, False, bias_B1TS, scale)
        else:
            score_BGRTS, slope_BGRTS = _scores(q, k, scores), None
            if scores.soft_cap is not None:  # the derivative of tanh is 1 - tanh^2
                slope_BGRTS = (score_BGRTS / scores.soft_cap).square_().neg_().add_(1)
            score_BGRTS = _hide(score_BGRTS, bias_B1TS)
            shape_BGRT1 = (*score_BGRTS.shape[:4], 1)
            weight_BGRTS = dropped_BGRTS = score_BGRTS.sub_(lse.reshape(shape_BGRT1)).exp_()
            dout = _group_heads(dout, k)
            dweight_BGRTS = _fp32_matmul(dout, v.transpose(2, 3)).view_as(weight_BGRTS)
            if mask and mask.dropout:
                scale_BGRTS = _dropout_scale(tile, weight_BGRTS.shape, mask, mask.dropout)
                dropped_BGRTS = weight_BGRTS * scale_BGRTS
                dweight_BGRTS *= scale_BGRTS
            # Softmax backward subtracts each row's mean gradient, sum(weight * dweight), which equals dout . out.
            mean_BGRT1 = (dout.float() * _group_heads(out, k).float()).sum(-1).view(shape_BGRT1)
            dscore_BGRTS = weight_BGRTS * (dweight_BGRTS - mean_BGRT1) * scale
            if slope_BGRTS is not None:
                dscore_BGRTS *= slope_BGRTS
            dscore = dscore_BGRTS.flatten(2, 3).to(k.dtype)
            dq = _fp32_matmul(dscore, k).view(q.shape)
            dk = _fp32_matmul(dscore.transpose(2, 3), _group_heads(q, k))
            dv = _fp32_matmul(dropped_BGRTS.flatten(2, 3).to(v.dtype).transpose(2, 3), dout)
        dq_BHTK[tile.batch, :, tile.queries] = dq
        dk_BGSK[tile.batch, :, tile.keys] += dk
        dv_BGSV[tile.batch, :, tile.keys] += dv
    return dq_BHTK, dk_BGSK, dv_BGSV


def score_tiles(
    q_BHTK: Tensor, k_BGSK: Tensor, causal: bool, with_scores: bool, window: int = 0
) -> Iterator[ScoreTile]:
    """Split queries x keys so that a tile of fp32 scores [B, H, T, S], or of biases [B, 1, T, S] without scores, fits
    TILE_BYTES: by samples first, then by queries of one sample. A causal tile leaves out keys after all its queries
    and those before the window of its first query; it has no more queries than the window, so that it leaves out most.
    """
    (batch, heads, queries, _), keys = q_BHTK.shape, k_BGSK.shape[2]
    assert queries == keys or not causal
    limit = TILE_BYTES // (keys * (4 * heads if with_scores else q_BHTK.element_size()))
    samples = min(batch, max(1, limit // queries))
    height = max(1, limit // samples)
    if causal and window:
        height = min(height, window)
    for first in range(0, batch, samples):
        for top in range(0, queries, height):
            bottom = min(top + height, queries)
            start = max(top - window + 1, 0) if causal and window else 0
            yield ScoreTile(slice(first, first + samples), slice(top, bottom), slice(start, bottom if causal else keys))


def _fused_kernel(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: BlockMask | None, scores: AttentionScores
) -> compat.AttentionKernel | None:
    if scores.soft_cap is not None or (mask and mask.dropout):
        return None
    return compat.select_attention_kernel(q, k, v, causal and mask is None, mask is not None)


def _bias(tile: ScoreTile, q: Tensor, causal: bool, mask: BlockMask | None) -> Tensor | None:
    """The mask bias to add to the scores of a tile, in the dtype of the queries."""
    hidden: Tensor | None = None
    if mask and mask.documents_BT is not None and mask.documents_BS is not None:
        query_BT, key_BS = mask.documents_BT[tile.batch, tile.queries], mask.documents_BS[tile.batch, tile.keys]
        hidden = (query_BT[:, :, None] != key_BS[:, None])[:, None]
    if mask and mask.window and mask.query_positions_T is not None and mask.key_positions_S is not None:
        query_T, key_S = mask.query_positions_T[tile.queries], mask.key_positions_S[tile.keys]
        early = (key_S <= query_T[:, None] - mask.window)[None, None]
        hidden = early if hidden is None else hidden.logical_or_(early)
    if causal:
        query_T, key_S = (torch.arange(part.start, part.stop, device=q.device) for part in (tile.queries, tile.keys))
        future = (key_S > query_T[:, None])[None, None]
        hidden = future if hidden is None else hidden.logical_or_(future)
    if hidden is None:
        return None
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, MASKED_SCORE)


def _scores(q: Tensor, k: Tensor, scores: AttentionScores) -> Tensor:
    """fp32 scores [B, G, R, T, S] before the mask."""
    (B, _, T, K), (_, G, S, _) = q.shape, k.shape
    score_BGRTS = _fp32_matmul(_group_heads(q, k), k.transpose(2, 3)).mul_(scores.scale_of(K)).view(B, G, -1, T, S)
    if scores.soft_cap is not None:
        score_BGRTS.div_(scores.soft_cap).tanh_().mul_(scores.soft_cap)
    return score_BGRTS


def _hide(score_BGRTS: Tensor, bias_B1TS: Tensor | None) -> Tensor:
    return score_BGRTS if bias_B1TS is None else score_BGRTS.add_(bias_B1TS[:, :, None])


def _dropout_scale(tile: ScoreTile, shape: torch.Size, mask: BlockMask, rng: DropoutRng) -> Tensor:
    """1 / (1 - p) for a weight that stays, 0 for a dropped one. It depends on the query's row seeds and, within that
    row, on head and key position, so that it is equal in all layouts."""
    assert mask.key_positions_S is not None
    assert rng.head_offset is not None
    _, groups, repeat, _, _ = shape
    head_H = torch.arange(groups * repeat, dtype=torch.int32, device=mask.key_positions_S.device) + rng.head_offset
    column_GR1S = head_H.view(groups, repeat, 1, 1) * 0x10001 + mask.key_positions_S[tile.keys]
    seed0, seed1 = (x[tile.batch, None, None, tile.queries, None] for x in (rng.seed0, rng.seed1))
    bits = element_bits((seed0, seed1), rng.site, column_GR1S) & 0x7FFFFFFF
    return (bits >= round(rng.p * 2**31)).float().div_(1 - rng.p)


def _group_heads(x_BHTK: Tensor, k_BGSK: Tensor) -> Tensor:
    """[B, H, T, K] to [B, G, R * T, K]: heads that share keys become rows of one matmul; keys are not repeated."""
    B, _, _, K = x_BHTK.shape
    return x_BHTK.reshape(B, k_BGSK.shape[1], -1, K)


def add_sinks(out_BHTV: Tensor, lse_BHT: Tensor, scores: AttentionScores) -> None:
    """Let sinks take part in the softmax, given the fp32 output and log-sum-exp over all keys, in place."""
    if scores.sinks is not None:
        out_BHTV *= scores.share_of_keys(lse_BHT)[..., None]
        torch.logaddexp(lse_BHT, scores.sinks.float()[:, None], out=lse_BHT)


def sink_gradient(dout_BHTV: Tensor, out_BHTV: Tensor, lse_BHT: Tensor, scores: AttentionScores) -> Tensor:
    """The gradient of the sinks, fp32 [H], given output and log-sum-exp over keys and sinks. A sink has a value of 0,
    so that its score has the gradient weight x (0 - dout . out)."""
    if scores.sinks is None:
        return out_BHTV.new_empty(0, dtype=torch.float32)
    weight_BHT = (scores.sinks.float()[:, None] - lse_BHT).exp_()
    return -(weight_BHT * (dout_BHTV.float() * out_BHTV.float()).sum(-1)).sum((0, 2))


def _fp32_matmul(a: Tensor, b: Tensor) -> Tensor:
    """[B, G, m, k] @ [B, G, k, n] in fp32: scores rounded to the inputs' dtype would be off by percents."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), torch.float32).view(*a.shape[:3], -1)
    return a.float() @ b.float()

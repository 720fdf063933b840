"""Exact attention, forward and backward, over a sequence that context-parallel ranks split.

The sequence is cut into 2 * cp chunks, and rank r holds chunk r and then chunk 2 * cp - 1 - r: late chunks see many
keys and early ones few, so that every rank has the same causal work. A rank's tokens stay in order, which makes each
step of the ring one block: its own keys are a plain causal block; all its queries see the first half of the keys of a
lower rank and none of the second half; only its second half of queries sees the keys of a higher rank, all of them.

- ring: keys and values rotate while the previous block is computed; in backward their gradients follow.
- all_gather: every rank gets all keys and values at once, and gradients are reduce-scattered.

Outputs of blocks are merged in fp32 by their log-sum-exp. With grouped-query attention only the few kv heads are sent.

For torch.compile all of it is one opaque operator, and graphs are equal on all ranks because the operator looks up the
rank when it runs.

Shapes: B batch, H heads, G kv heads, T local tokens, S available keys, K head size, V width of values.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from trainyard import compat
from trainyard.core.counter_rng import DropoutRng
from trainyard.kernels.custom_op import WORKSPACE_BYTES
from trainyard.kernels.reference import PLAIN_SCORES, AttentionScores
from trainyard.parallel import attention_blocks as blocks
from trainyard.parallel import packed_documents
from trainyard.parallel.attention_blocks import BlockMask
from trainyard.parallel.process_group import Group

CpMethod = Literal["ring", "all_gather"]


class AttentionSpec(NamedTuple):
    """Options of attention. Documents and dropout are those of the local tokens; the rest is equal on all ranks."""

    method: CpMethod
    causal: bool
    documents_BT: Tensor | None = None
    dropout: DropoutRng | None = None
    window: int = 0
    """Number of tokens, its own included, that a query sees at most; 0: no limit."""
    scores: AttentionScores = PLAIN_SCORES


class KeyChunk(NamedTuple):
    """Keys and values that are available at one step, and the blocks that a rank computes with them."""

    k_BGSK: Tensor
    v_BGSV: Tensor
    documents_BS: Tensor | None
    key_positions_S: Tensor
    query_positions_T: Tensor
    """Global positions of the local queries."""
    blocks: list[blocks.AttentionBlock]


def forward(ring: Group, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, V] of the local queries over all keys, and its fp32 log-sum-exp [B, H, T]."""
    if ring.size == 1:  # one block
        (chunk,) = _key_chunks(ring, k_BGTK, v_BGTV, spec)
        mask = _block_mask(chunk.blocks[0], chunk, spec)
        out_BHTV, lse_BHT = blocks.forward(q_BHTK, k_BGTK, v_BGTV, spec.causal, mask, spec.scores)
        lse_BHT = lse_BHT.contiguous()
        blocks.add_sinks(out_BHTV, lse_BHT, spec.scores)
        return _token_major(out_BHTV, q_BHTK.dtype), lse_BHT
    out_BHTV = torch.empty((*q_BHTK.shape[:3], v_BGTV.shape[3]), dtype=torch.float32, device=q_BHTK.device)
    lse_BHT = torch.empty(q_BHTK.shape[:3], dtype=torch.float32, device=q_BHTK.device)
    for chunk in _key_chunks(ring, k_BGTK, v_BGTV, spec):
        for block in chunk.blocks:
            q, k, v = q_BHTK[:, :, block.queries], chunk.k_BGSK[:, :, block.keys], chunk.v_BGSV[:, :, block.keys]
            part, part_lse = blocks.forward(q, k, v, block.causal, _block_mask(block, chunk, spec), spec.scores)
            out, lse = out_BHTV[:, :, block.queries], lse_BHT[:, :, block.queries]
            if block.is_first:
                out.copy_(part)
                lse.copy_(part_lse)
            else:
                # The softmax over both blocks of keys: weights exp(lse) / (exp(lse) + exp(part_lse)), without overflow.
                out.lerp_(part.float(), (part_lse - lse).sigmoid_()[..., None])
                lse.copy_(torch.logaddexp(lse, part_lse))
    blocks.add_sinks(out_BHTV, lse_BHT, spec.scores)
    return _token_major(out_BHTV, q_BHTK.dtype), lse_BHT


def backward(
    ring: Group,
    dout_BHTV: Tensor,
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    out_BHTV: Tensor,
    lse_BHT: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the local q, k and v, summed in fp32. `out` and `lse` are the results of `forward`."""
    if ring.size == 1:
        (chunk,) = _key_chunks(ring, k_BGTK, v_BGTV, spec)
        inputs = (dout_BHTV, q_BHTK, k_BGTK, v_BGTV, out_BHTV, lse_BHT)
        mask = _block_mask(chunk.blocks[0], chunk, spec)
        dq, dk, dv = blocks.backward(*inputs, spec.causal, mask, spec.scores)
        return _token_major(dq, q_BHTK.dtype), _token_major(dk, k_BGTK.dtype), _token_major(dv, v_BGTV.dtype)
    dq_BHTK = torch.empty(q_BHTK.shape, dtype=torch.float32, device=q_BHTK.device)
    receive: Callable[[], list[Tensor]] | None = None
    local_grads: list[Tensor] = []
    for step, chunk in enumerate(_key_chunks(ring, k_BGTK, v_BGTV, spec)):
        gradients = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (chunk.k_BGSK, chunk.v_BGSV)]
        for block in chunk.blocks:
            dout, q, out, lse = (x[:, :, block.queries] for x in (dout_BHTV, q_BHTK, out_BHTV, lse_BHT))
            k, v = chunk.k_BGSK[:, :, block.keys], chunk.v_BGSV[:, :, block.keys]
            mask = _block_mask(block, chunk, spec)
            dq, *parts = blocks.backward(dout, q, k, v, out, lse, block.causal, mask, spec.scores)
            if block.is_first:
                dq_BHTK[:, :, block.queries] = dq
            else:
                dq_BHTK[:, :, block.queries] += dq
            for total, part in zip(gradients, parts, strict=True):
                total[:, :, block.keys] += part
        if step == 0:  # gradients of this rank's own keys (or of all keys, gathered) wait for the other ranks' parts
            local_grads = gradients
            continue
        # The sums of the previous ranks for these keys arrived while this rank's part was computed.
        if receive is not None:
            gradients = [x.add_(received) for x, received in zip(gradients, receive(), strict=True)]
        # Gradients travel with the ring too, one step behind their keys, and end at the keys' own rank.
        receive = ring.rotate(gradients)
    if receive is not None:
        local_grads = [x.add_(received) for x, received in zip(local_grads, receive(), strict=True)]
    elif ring.size > 1:
        local_grads = [ring.reduce_scatter(blocks.to_rank_order(x, ring.size, 2))[0] for x in local_grads]
    dk, dv = local_grads
    return _token_major(dq_BHTK, q_BHTK.dtype), _token_major(dk, k_BGTK.dtype), _token_major(dv, v_BGTV.dtype)


def _key_chunks(ring: Group, k: Tensor, v: Tensor, spec: AttentionSpec) -> Iterator[KeyChunk]:
    """All keys in chunks, as the method delivers them. The next exchange is in flight while a chunk is used."""
    size, rank, tokens = ring.size, ring.rank, k.shape[2]
    assert size == 1 or tokens % 2 == 0
    documents = spec.documents_BT
    queries = blocks.rank_token_positions(rank, size, tokens, k.device)
    if spec.method == "all_gather" and size > 1:
        k, v = (blocks.to_natural_order(ring.all_gather(x[None]), 2) for x in (k, v))
        documents = None if documents is None else blocks.to_natural_order(ring.all_gather(documents[None]), 1)
        positions = torch.arange(size * tokens, dtype=torch.int32, device=k.device)
        yield KeyChunk(k, v, documents, positions, queries, blocks.gathered_blocks(rank, size, tokens, spec.causal))
        return
    for step in range(size):
        receive = ring.rotate([k, v]) if step + 1 < size else None
        receive_documents = ring.rotate([documents]) if receive and documents is not None else None
        source = (rank - step) % size
        positions = blocks.rank_token_positions(source, size, tokens, k.device)
        yield KeyChunk(k, v, documents, positions, queries, [blocks.ring_block(source, rank, tokens, spec.causal)])
        if receive:
            k, v = receive()
        if receive_documents:
            (documents,) = receive_documents()


def _block_mask(block: blocks.AttentionBlock, chunk: KeyChunk, spec: AttentionSpec) -> BlockMask | None:
    """The mask of one block; None if the block has neither documents nor dropout nor a window."""
    documents_BT, dropout = spec.documents_BT, spec.dropout
    if documents_BT is None and dropout is None and not spec.window:
        return None
    query_documents = None if documents_BT is None else documents_BT[:, block.queries]
    key_documents = None if chunk.documents_BS is None else chunk.documents_BS[:, block.keys]
    if dropout is not None:
        seed0, seed1 = dropout.seed0[:, block.queries], dropout.seed1[:, block.queries]
        dropout = dropout._replace(seed0=seed0, seed1=seed1)
    keys_S, queries_T = chunk.key_positions_S[block.keys], chunk.query_positions_T[block.queries]
    return BlockMask(query_documents, key_documents, dropout, keys_S, queries_T, spec.window)


def _token_major(x_BHTK: Tensor, dtype: torch.dtype) -> Tensor:
    """x as [B, T, H, K] in memory, so that the matmuls next to attention can view it as [B, T, H * K]."""
    if x_BHTK.dtype == dtype and x_BHTK.transpose(1, 2).is_contiguous():
        return x_BHTK
    return _empty_token_major(x_BHTK, dtype, x_BHTK.shape[3]).copy_(x_BHTK)


def _empty_token_major(like_BHTK: Tensor, dtype: torch.dtype, columns: int) -> Tensor:
    B, H, T, _ = like_BHTK.shape
    return torch.empty((B, T, H, columns), dtype=dtype, device=like_BHTK.device).transpose(1, 2)


@torch.library.custom_op("trainyard::context_attention", mutates_args=())
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    rng_tensors: list[Tensor],
    p: float,
    group: str,
    size: int,
    method: str,
    causal: bool,
    window: int,
    max_documents: int,
    scale: float | None,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    """`forward` as an operator: attention of this rank's queries over the keys of all `size` ranks of the process group
    `group`. `rng_tensors` are the four tensors of `DropoutRng`, or empty without dropout. `max_documents` is that of
    `ContextAxis`; `scale`, `soft_cap` and `sinks` are `AttentionScores`."""
    q, k, v = (_contiguous_last_dim(x) for x in (q, k, v))
    scores = AttentionScores(scale, soft_cap, sinks)
    if _has_varlen_kernel(q, v, documents, p, size, causal, window, max_documents, soft_cap):
        return packed_documents.forward(q, k, v, documents, max_documents, window, scores)
    return forward(_ring(group, size), q, k, v, _spec(method, causal, window, documents, p, rng_tensors, scores))


@torch.library.custom_op("trainyard::context_attention_backward", mutates_args=())
def context_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    rng_tensors: list[Tensor],
    p: float,
    group: str,
    size: int,
    method: str,
    causal: bool,
    window: int,
    max_documents: int,
    scale: float | None,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`backward` as an operator; the last result is the gradient of the sinks (empty without)."""
    dout, q, k, v = (_contiguous_last_dim(x) for x in (dout, q, k, v))
    scores = AttentionScores(scale, soft_cap, sinks)
    d_sinks = blocks.sink_gradient(dout, out, lse, scores)
    if _has_varlen_kernel(q, v, documents, p, size, causal, window, max_documents, soft_cap):
        inputs = (dout, q, k, v, out, lse, documents)
        return *packed_documents.backward(*inputs, max_documents, window, scores), d_sinks
    spec = _spec(method, causal, window, documents, p, rng_tensors, scores)
    return *backward(_ring(group, size), dout, q, k, v, out, lse, spec), d_sinks


def _has_varlen_kernel(
    q: Tensor, v: Tensor, documents: Tensor | None, p: float, size: int, causal: bool, window: int, max_documents: int,
    soft_cap: float | None,
) -> bool:  # fmt: skip
    """True if one kernel skips what documents or windows hide, or computes soft-caps."""
    is_plain = size == 1 and causal and not p and v.shape[-1] <= q.shape[-1]
    has_starts = max_documents > 0 if documents is not None else window > 0 or soft_cap is not None
    return is_plain and has_starts and compat.has_varlen_flash(q)


def _ring(name: str, size: int) -> Group:
    """The process group, which a graph knows only by its name. A single rank needs none."""
    return Group(tuple(range(size)), compat.group_rank(name) if size > 1 else 0, name)


def _spec(
    method: str, causal: bool, window: int, documents: Tensor | None, p: float, rng_tensors: list[Tensor],
    scores: AttentionScores,
) -> AttentionSpec:  # fmt: skip
    rng = DropoutRng(p, *rng_tensors) if rng_tensors else None
    return AttentionSpec(cast(CpMethod, method), causal, documents, rng, window, scores)


def _contiguous_last_dim(x: Tensor) -> Tensor:
    """Kernels take any strides except in the last dim; a gradient may be an expanded scalar."""
    return x if x.stride(-1) == 1 else x.contiguous()


@context_attention.register_fake
def _(q: Tensor, _k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_token_major(q, q.dtype, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@context_attention_backward.register_fake
def _(
    _dout: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, _lse: Tensor, _documents: Any, sinks: Any, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (_empty_token_major(x, x.dtype, x.shape[3]) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0 if sinks is None else sinks.shape, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, sinks, rng_tensors, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, documents, sinks, *rng_tensors)


def _autograd_backward(ctx: Any, dout: Tensor, _dlse: None) -> tuple[Any, ...]:
    q, k, v, out, lse, documents, sinks, *rng_tensors = ctx.saved_tensors
    inputs = (dout, q, k, v, out, lse, documents, sinks, rng_tensors)
    *gradients, d_sinks = context_attention_backward(*inputs, *ctx.options)
    d_sinks = None if sinks is None else d_sinks.to(sinks.dtype)
    return *gradients, None, d_sinks, [None] * len(rng_tensors), *[None] * len(ctx.options)


context_attention.register_autograd(_autograd_backward, setup_context=_setup_context)


def attention_messages(
    method: CpMethod, size: int, keys: int, values: int, documents: int, dtype: torch.dtype, backward: bool
) -> Iterator[tuple[str, torch.dtype, int, int]]:
    """(kind, dtype, bytes, times) of what a rank with so many elements of keys and values and `documents` ids sends in
    a forward or a backward pass. Backward sends keys and values again, and their fp32 gradients."""
    if method == "ring":
        parts, steps, forward, returned = [keys + values], size - 1, "all_to_all", "all_to_all"
    else:
        parts, steps, forward, returned = [size * keys, size * values], 1, "all_gather", "reduce_scatter"
        documents *= size
    for elements in parts:
        yield forward, dtype, elements * dtype.itemsize, steps
        if backward:
            yield returned, torch.float32, elements * 4, steps
    yield forward, torch.int32, documents * 4, steps


def _tile_bytes(
    q: Tensor, documents: Tensor | None, p: float, size: int, causal: bool, window: int, soft_cap: float | None
) -> int:
    """Tiles of biases, or of the scores that dropout and soft-caps need: a few of those are alive at a time."""
    if p == 0 and soft_cap is None and not window and (documents is None or (size == 1 and not causal)):
        return 0
    batch, heads, tokens, _ = q.shape
    keys = tokens * size
    smallest = 4 * heads * keys
    tiles = (4 if p or soft_cap is not None else 1) * blocks.TILE_BYTES
    return min(tiles, 4 * max(smallest, batch * tokens * keys * 4 * heads))


def _forward_workspace(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, sinks: Tensor | None, rng_tensors: list[Tensor],
    p: float, group: str, size: int, method: str, causal: bool, window: int, max_documents: int, scale: float | None,
    soft_cap: float | None,
) -> int:  # fmt: skip
    """fp32 outputs of all blocks and of one, and keys and values of other ranks."""
    received = 0 if size == 1 else (k.nbytes + v.nbytes) * (size + 1 if method == "all_gather" else 2)
    outputs = (1 if size == 1 else 2) * 4 * q.shape[:3].numel() * v.shape[3]
    return outputs + received + _tile_bytes(q, documents, p, size, causal, window, soft_cap)


def _backward_workspace(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None,
    sinks: Tensor | None, rng_tensors: list[Tensor], p: float, group: str, size: int, method: str, causal: bool,
    window: int, max_documents: int, scale: float | None, soft_cap: float | None,
) -> int:  # fmt: skip
    """fp32 gradients of queries, and of keys and values with those of other ranks."""
    received = 0 if size == 1 else (k.nbytes + v.nbytes) * (size + 1 if method == "all_gather" else 2)
    copies = 1 if size == 1 else 2 * size if method == "all_gather" else 3
    gradients = 4 * (2 * q.numel() + copies * (k.numel() + v.numel()))
    return gradients + received + _tile_bytes(q, documents, p, size, causal, window, soft_cap)


WORKSPACE_BYTES[torch.ops.trainyard.context_attention.default] = _forward_workspace
WORKSPACE_BYTES[torch.ops.trainyard.context_attention_backward.default] = _backward_workspace

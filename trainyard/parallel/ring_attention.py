"""Attention over a sequence that is split across context parallel ranks, exact, forward and backward.

The sequence is cut into 2 * cp chunks, and rank r holds chunk r and then chunk 2 * cp - 1 - r: late chunks see many
keys and early ones few, so every rank has the same causal work. A rank's tokens stay in order, which makes each step of
the ring one block: its own keys are a plain causal block; of keys from a lower rank all its queries see the first half
and none the second; keys from a higher rank are all seen by its second half of queries only.

- ring: keys and values go round while the block before them is computed; in the backward pass their gradients follow.
- all_gather: every rank gets all keys and values at once, and gradients are summed home.

Outputs of blocks are merged in fp32 by their log-sum-exp. Only the small keys and values of grouped heads travel.

The whole is one opaque operator for torch.compile, and graphs are equal on all ranks: the rank is asked of the group
when the operator runs. The algorithm sees the ranks through `Ring`, so that tests can run them as threads.

Shapes: B batch, H heads, G kv heads, T local tokens, S keys at hand, K head size.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from trainyard import compat
from trainyard.core.counter_rng import DropoutRng
from trainyard.parallel import attention_blocks as blocks
from trainyard.parallel.attention_blocks import BlockMask

CpMethod = Literal["ring", "all_gather"]


class RingTransport(Protocol):
    """The ranks that share a sequence."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def rotate(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Start to send tensors of one dtype to the next rank; the result waits for those of the rank before."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] of each rank to [size, ...]."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size, ...], one part for each rank, to the sum of this rank's parts."""


class ProcessGroupRing:
    """The ranks of a process group, by its name. A single rank needs no group."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.rank = compat.group_rank(name) if size > 1 else 0

    def rotate(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        packed, shapes = torch.cat([x.flatten() for x in tensors]), [x.shape for x in tensors]
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        coming = compat.sendrecv(packed, after, before, self.size, self.name)

        def arrived() -> list[Tensor]:
            parts = compat.wait(coming).split_with_sizes([shape.numel() for shape in shapes])
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

        return arrived

    def all_gather(self, x: Tensor) -> Tensor:
        return compat.wait(compat.all_gather(x[None], self.size, self.name))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return compat.wait(compat.reduce_scatter(x, self.size, self.name))[0]


class AttentionSpec(NamedTuple):
    """How to attend: the same on all ranks but for documents and dropout, which are those of the local tokens."""

    method: CpMethod
    causal: bool
    documents_BT: Tensor | None = None
    dropout: DropoutRng | None = None


class KeyChunk(NamedTuple):
    """Keys and values that are at hand, with the blocks that a rank computes with them."""

    k_BGSK: Tensor
    v_BGSK: Tensor
    documents_BS: Tensor | None
    key_positions_S: Tensor
    blocks: list[blocks.AttentionBlock]


def forward(
    ring: RingTransport, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Output of the local queries over all keys, and its fp32 log-sum-exp [B, H, T]."""
    out_BHTK = torch.empty(q_BHTK.shape, dtype=torch.float32, device=q_BHTK.device)
    lse_BHT = torch.empty(q_BHTK.shape[:3], dtype=torch.float32, device=q_BHTK.device)
    for keys in _key_chunks(ring, k_BGTK, v_BGTK, spec):
        for block in keys.blocks:
            q, k, v = q_BHTK[:, :, block.queries], keys.k_BGSK[:, :, block.keys], keys.v_BGSK[:, :, block.keys]
            part, part_lse = blocks.forward(q, k, v, block.causal, _block_mask(block, keys, spec))
            out, lse = out_BHTK[:, :, block.queries], lse_BHT[:, :, block.queries]
            if block.is_first:
                out.copy_(part)
                lse.copy_(part_lse)
            else:
                out.lerp_(part.float(), (part_lse - lse).sigmoid_()[..., None])
                lse.copy_(torch.logaddexp(lse, part_lse))
    return _token_major(out_BHTK, q_BHTK.dtype), lse_BHT


def backward(
    ring: RingTransport,
    dout_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    out_BHTK: Tensor,
    lse_BHT: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the local q, k and v, summed in fp32. `out` and `lse` are what `forward` gave."""
    dq_BHTK = torch.empty(q_BHTK.shape, dtype=torch.float32, device=q_BHTK.device)
    coming: Callable[[], list[Tensor]] | None = None
    home: list[Tensor] = []
    for step, keys in enumerate(_key_chunks(ring, k_BGTK, v_BGTK, spec)):
        gradients = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (keys.k_BGSK, keys.v_BGSK)]
        for block in keys.blocks:
            rows = block.queries
            dout, q, out, lse = (x[:, :, rows] for x in (dout_BHTK, q_BHTK, out_BHTK, lse_BHT))
            k, v = keys.k_BGSK[:, :, block.keys], keys.v_BGSK[:, :, block.keys]
            dq, *parts = blocks.backward(dout, q, k, v, out, lse, block.causal, _block_mask(block, keys, spec))
            if block.is_first:
                dq_BHTK[:, :, rows] = dq
            else:
                dq_BHTK[:, :, rows] += dq
            for total, part in zip(gradients, parts, strict=True):
                total[:, :, block.keys] += part
        if step == 0:  # of this rank's own keys (or of all, gathered): stays until the others' parts come home
            home = gradients
            continue
        # What the ranks before have summed for these keys came while this rank's part was computed.
        if coming is not None:
            gradients = [mine.add_(theirs) for mine, theirs in zip(gradients, coming(), strict=True)]
        coming = ring.rotate(gradients)
    if coming is not None:
        home = [mine.add_(theirs) for mine, theirs in zip(home, coming(), strict=True)]
    elif ring.size > 1:
        home = [ring.reduce_scatter(blocks.to_rank_order(x, ring.size, 2)) for x in home]
    dk, dv = home
    return _token_major(dq_BHTK, q_BHTK.dtype), _token_major(dk, k_BGTK.dtype), _token_major(dv, v_BGTK.dtype)


def _key_chunks(ring: RingTransport, k: Tensor, v: Tensor, rule: AttentionSpec) -> Iterator[KeyChunk]:
    """All keys, as many at a time as the method has at hand. The next exchange is under way while they are used."""
    size, rank, tokens = ring.size, ring.rank, k.shape[2]
    assert size == 1 or tokens % 2 == 0
    documents = rule.documents_BT
    if rule.method == "all_gather" and size > 1:
        k, v = (blocks.to_natural_order(ring.all_gather(x), 2) for x in (k, v))
        documents = None if documents is None else blocks.to_natural_order(ring.all_gather(documents), 1)
        place = torch.arange(size * tokens, dtype=torch.int32, device=k.device)
        yield KeyChunk(k, v, documents, place, blocks.gathered_blocks(rank, size, tokens, rule.causal))
        return
    for step in range(size):
        coming = ring.rotate([k, v]) if step + 1 < size else None
        coming_documents = ring.rotate([documents]) if coming and documents is not None else None
        source = (rank - step) % size
        place, block = (
            blocks.rank_token_positions(source, size, tokens, k.device),
            blocks.ring_block(source, rank, tokens, rule.causal),
        )
        yield KeyChunk(k, v, documents, place, [block])
        if coming:
            k, v = coming()
        if coming_documents:
            (documents,) = coming_documents()


def _block_mask(block: blocks.AttentionBlock, keys: KeyChunk, rule: AttentionSpec) -> BlockMask | None:
    documents_BT, dropout = rule.documents_BT, rule.dropout
    if documents_BT is None and dropout is None:
        return None
    mine = None if documents_BT is None else documents_BT[:, block.queries]
    theirs = None if keys.documents_BS is None else keys.documents_BS[:, block.keys]
    if dropout is not None:
        seed0, seed1 = dropout.seed0[:, block.queries], dropout.seed1[:, block.queries]
        dropout = dropout._replace(seed0=seed0, seed1=seed1)
    return BlockMask(mine, theirs, dropout, keys.key_positions_S[block.keys])


def _token_major(x_BHTK: Tensor, dtype: torch.dtype) -> Tensor:
    """Made anew, [B, T, H, K] in memory: the products next to attention, over [B, T, H * K], then see it as it is."""
    return _empty_token_major(x_BHTK, dtype).copy_(x_BHTK)


def _empty_token_major(like_BHTK: Tensor, dtype: torch.dtype) -> Tensor:
    B, H, T, K = like_BHTK.shape
    return torch.empty((B, T, H, K), dtype=dtype, device=like_BHTK.device).transpose(1, 2)


@torch.library.custom_op("trainyard::context_attention", mutates_args=())
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    words: list[Tensor],
    p: float,
    group: str,
    size: int,
    method: str,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """`forward` as an operator. `words` are the four tensors of `DropoutRng`, or none."""
    rule = AttentionSpec(cast(CpMethod, method), causal, documents, DropoutRng(p, *words) if words else None)
    return forward(
        ProcessGroupRing(group, size), _contiguous_last_dim(q), _contiguous_last_dim(k), _contiguous_last_dim(v), rule
    )


@torch.library.custom_op("trainyard::context_attention_backward", mutates_args=())
def context_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    words: list[Tensor],
    p: float,
    group: str,
    size: int,
    method: str,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rule = AttentionSpec(cast(CpMethod, method), causal, documents, DropoutRng(p, *words) if words else None)
    return backward(
        ProcessGroupRing(group, size),
        _contiguous_last_dim(dout),
        _contiguous_last_dim(q),
        _contiguous_last_dim(k),
        _contiguous_last_dim(v),
        out,
        lse,
        rule,
    )


def _contiguous_last_dim(x: Tensor) -> Tensor:
    """Kernels take any strides but for the last dim. A gradient may be an expanded scalar."""
    return x if x.stride(-1) == 1 else x.contiguous()


@context_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_token_major(q, q.dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


@context_attention_backward.register_fake
def _(_dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_token_major(q, q.dtype), _empty_token_major(k, k.dtype), _empty_token_major(v, v.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, words, *ctx.plain = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, documents, *words)


def _autograd_backward(ctx: Any, dout: Tensor, _dlse: None) -> tuple[Any, ...]:
    q, k, v, out, lse, documents, *words = ctx.saved_tensors
    gradients = context_attention_backward(dout, q, k, v, out, lse, documents, words, *ctx.plain)
    return *gradients, None, [None] * len(words), *[None] * len(ctx.plain)


context_attention.register_autograd(_autograd_backward, setup_context=_setup_context)


def attend(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    *,
    group: str,
    size: int,
    method: CpMethod,
    causal: bool,
    documents_BT: Tensor | None = None,
    dropout: DropoutRng | None = None,
) -> Tensor:
    """softmax(q k / sqrt(K)) v of this rank's queries over the keys of all `size` ranks of the process group `group`.

    A query sees keys with its own document id (int32), and under `causal` none after its place. Alone (size 1) there
    need be no group.
    """
    p, *words = dropout or (0.0,)
    out, _ = context_attention(q_BHTK, k_BGTK, v_BGTK, documents_BT, words, p, group, size, method, causal)
    return out

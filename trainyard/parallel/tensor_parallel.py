"""Where data crosses ranks. A model is handed axes and never imports torch.distributed.

`tp.columns(x, ...)` going into and `tp.scatter(x)` coming out of attention and MLP are the only crossings of tensor
parallelism in a block; `cp.attend(q, k, v)`, or `cp.gather(k)` where a device traces attention, is the only one of
context parallelism. On one rank every crossing is the identity, so the same model code runs on a laptop and on a
cluster. Nothing in a block depends on the rank's number but what comes in as a tensor: all ranks of a stage trace the
same graph for it.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.parallel.attention_blocks import rank_token_positions, to_natural_order, to_rank_order
from trainyard.parallel.process_group import Group, wait
from trainyard.parallel.ring_attention import Dropped, attend

TOKEN_DIM = 1
"""The dim of tokens in activations [B, T, D]."""


class LinearLike(Protocol):
    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def fp8(self) -> object: ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def matmul(self, x: Tensor) -> Tensor: ...


class TensorAxis:
    """Ranks that share each matrix. With `sequence` they also share the tokens between the parts of a block."""

    def __init__(self, group: Group | None = None, sequence_parallel: bool = False) -> None:
        self.group = group or Group()
        self.size, self.rank = self.group.size, self.group.rank
        self.sequence_parallel = sequence_parallel and self.size > 1

    def gather_sum_grads(self, x: Tensor) -> Tensor:
        """Before a column-split product: every token on every rank. Backward sums what the ranks found."""
        if self.sequence_parallel:
            return _GatherTokens.apply(x, self.group, True)  # type: ignore[no-untyped-call]
        return self.copy_sum_grads(x)

    def column_parallel(
        self, x: Tensor, *linears: LinearLike, keep_gathered: bool = False, add_bias: bool = True
    ) -> tuple[Tensor, ...]:
        """Column-split products of the same x: every token meets this rank's rows of each matrix.

        Under `sequence` the gathered tokens, a whole activation, are not kept: backward gathers them again, while it
        multiplies. `keep` them inside what is recomputed anyway. In fp8 they are kept, in half the bytes. `bias` says
        whether biases are added here.
        """
        if self.sequence_parallel and not keep_gathered and not linears[0].fp8:
            tensors = [tensor for linear in linears for tensor in (linear.weight, linear.bias if add_bias else None)]
            return _ColumnParallel.apply(x, self.group, *tensors)  # type: ignore[no-untyped-call]
        x = self.gather_sum_grads(x)
        return tuple(linear(x) if add_bias else linear.matmul(x) for linear in linears)

    def reduce_output(self, x: Tensor) -> Tensor:
        """After a row-split product: sum the ranks' parts (under `sequence`, each rank keeps its tokens)."""
        if self.size == 1:
            return x
        return (_ReduceScatterTokens if self.sequence_parallel else _AllReduce).apply(x, self.group)  # type: ignore[no-untyped-call]

    def copy_sum_grads(self, x: Tensor) -> Tensor:
        """The same on every rank going forward; backward sums what the ranks found."""
        return x if self.size == 1 else _CopySumGrads.apply(x, self.group)  # type: ignore[no-untyped-call]

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Every token on every rank, for work that all ranks repeat: backward just takes this rank's tokens."""
        return _GatherTokens.apply(x, self.group, False) if self.sequence_parallel else x  # type: ignore[no-untyped-call]

    def local_tokens(self, x: Tensor, rank: Tensor) -> Tensor:
        """This rank's tokens of a constant [..., T]; `rank` as a tensor, so that it stays out of the graph."""
        if not self.sequence_parallel:
            return x
        parts = x.reshape(*x.shape[:-1], self.size, -1)
        return parts.index_select(-2, rank.reshape(1)).squeeze(-2)

    def gather_last_dim(self, x: Tensor) -> Tensor:
        """Every rank's stretch of the last dim, for work that all ranks repeat."""
        return x if self.size == 1 else _GatherLastDim.apply(x, self.group)  # type: ignore[no-untyped-call]


class ContextAxis:
    """Ranks that share the sequence. It is cut in 2 x size chunks and rank r holds chunks r and 2 size - 1 - r, so that
    each rank has the same work under a causal mask."""

    def __init__(
        self, group: Group | None = None, method: Literal["ring", "all_gather"] = "ring", traces_attention: bool = False
    ) -> None:
        self.group = group or Group()
        self.size, self.rank = self.group.size, self.group.rank
        self.method: Literal["ring", "all_gather"] = method
        self.traces_attention = traces_attention
        """Keys are gathered and attended to in plain operations (`Device.traces_attention`): `attend` is not asked."""

    def token_positions(self, tokens: int, rank: Tensor) -> Tensor:
        """Global places [T] of this rank's `tokens` tokens, int32; `rank` as a tensor."""
        return rank_token_positions(rank, self.size, tokens, rank.device)

    def gather_sequence(self, x: Tensor, dim: int) -> Tensor:
        """Keys, values or documents of the whole sequence, in natural order along `dim`. Backward sums home in fp32."""
        return x if self.size == 1 else _GatherSequence.apply(x, self.group, dim)  # type: ignore[no-untyped-call]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Tensor | None, dropout: Dropped | None
    ) -> Tensor:
        return attend(
            q,
            k,
            v,
            group=self.group.name,
            size=self.size,
            method=self.method,
            causal=causal,
            documents_BT=documents,
            dropout=dropout,
        )


@dataclass(frozen=True)
class Axes:
    tp: TensorAxis = field(default_factory=TensorAxis)
    cp: ContextAxis = field(default_factory=ContextAxis)


class _ColumnParallel(torch.autograd.Function):
    """Gather and multiply. What travels in backward does so while something is multiplied."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        # One name for all: where gradients are off, dynamo (torch 2.13) takes a forward of as many names as arguments
        # for one without a context.
        x, group, *tensors = arguments
        ctx.group = group
        ctx.save_for_backward(x, *tensors)
        whole = group.gather(x, TOKEN_DIM)
        return tuple(F.linear(whole, w, b) for w, b in zip(tensors[::2], tensors[1::2], strict=True) if w is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group: Group = ctx.group
        x, *tensors = ctx.saved_tensors
        gathering = group.start_all_gather(x)
        d_whole = sum(d @ w for d, w in zip(grads, tensors[::2], strict=True))
        assert isinstance(d_whole, Tensor)
        scattering = group.start_reduce_scatter_dim(d_whole, TOKEN_DIM)
        whole = group.finish_all_gather(gathering, x, TOKEN_DIM).flatten(0, 1)
        out: list[Tensor | None] = []
        for d, bias in zip(grads, tensors[1::2], strict=True):
            flat = d.flatten(0, 1)
            out += [flat.T @ whole, flat.sum(0) if bias is not None else None]
        return group.finish_reduce_scatter(scattering, d_whole, TOKEN_DIM), None, *out


class _CopySumGrads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.sum(grads[0]), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.all_reduce_sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, summed: bool) -> Tensor:
        ctx.group, ctx.summed = group, summed
        return group.all_gather(x, TOKEN_DIM)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group = ctx.group
        if ctx.summed:
            return group.reduce_scatter(grads[0], TOKEN_DIM), None, None
        return grads[0].chunk(group.size, TOKEN_DIM)[group.rank], None, None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.reduce_scatter(x, TOKEN_DIM)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.gather(grads[0], TOKEN_DIM), None


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_gather(x, x.dim() - 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].chunk(ctx.group.size, -1)[ctx.group.rank], None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.dtype = group, dim, x.dtype
        return to_natural_order(wait(group.start_all_gather(x[None])), dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts = to_rank_order(grads[0].float(), ctx.group.size, ctx.dim)
        return wait(ctx.group.start_reduce_scatter(parts))[0].to(ctx.dtype), None, None

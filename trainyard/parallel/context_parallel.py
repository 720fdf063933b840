"""Context parallelism: ranks split the sequence of every sample."""

from typing import Any

import torch
from torch import Tensor

from trainyard.core.counter_rng import DropoutRng
from trainyard.kernels.reference import PLAIN_SCORES, AttentionScores
from trainyard.parallel.attention_blocks import rank_token_positions, to_natural_order, to_rank_order
from trainyard.parallel.process_group import Group
from trainyard.parallel.ring_attention import CpMethod, context_attention
from trainyard.parallel.tensor_parallel import Collective


class ContextAxis:
    """Ranks that split the sequence. It is cut into 2 x size chunks, and rank r holds chunks r and 2 size - 1 - r, so
    that every rank has the same work under a causal mask."""

    def __init__(
        self, group: Group | None = None, method: CpMethod = "ring", decomposes_attention: bool = False
    ) -> None:
        self.group = group or Group()
        self.size, self.rank = self.group.size, self.group.rank
        self.method: CpMethod = method
        self.decomposes_attention = decomposes_attention
        """Keys are gathered and attention uses plain operators (`DeviceKind.decomposes_attention`), not `attend`."""
        self.max_documents = 0
        """No micro batch has more documents; 0: not known. Whoever runs batches sets it."""

    def token_positions(self, tokens: int, rank: Tensor) -> Tensor:
        """Global positions [T] of this rank's tokens, int32; `rank` is a tensor to keep it out of the graph."""
        return rank_token_positions(rank, self.size, tokens, rank.device)

    def gather_sequence(self, x: Tensor, dim: int) -> Tensor:
        """Keys, values or document ids of the full sequence, in natural order along `dim`. Backward reduce-scatters the
        gradients in fp32."""
        return x if self.size == 1 else _GatherSequence.apply(x, self.group, dim)  # type: ignore[no-untyped-call]

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks of what each computed from its tokens. Backward sums the gradients of all ranks, too."""
        return x if self.size == 1 else Collective.apply(x, self.group, "all_reduce", "all_reduce", 0)  # type: ignore[no-untyped-call]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Tensor | None, dropout: DropoutRng | None,
        window: int | None = None, scores: AttentionScores = PLAIN_SCORES,
    ) -> Tensor:  # fmt: skip
        """Attention of this rank's queries over the keys of all ranks. A query sees keys with its own document id
        (int32) and, if causal, no later key, and none that is `window` or more tokens earlier."""
        p, *rng_tensors = dropout or (0.0,)
        scale, soft_cap, sinks = scores
        options = (p, self.group.name, self.size, self.method, causal, window or 0, self.max_documents)
        return context_attention(q, k, v, documents, sinks, rng_tensors, *options, scale, soft_cap)[0]


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.dtype = group, dim, x.dtype
        return to_natural_order(group.all_gather(x[None]), dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts = to_rank_order(grads[0].float(), ctx.group.size, ctx.dim)
        return ctx.group.reduce_scatter(parts)[0].to(ctx.dtype), None, None

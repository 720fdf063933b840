"""Tensor parallelism: ranks split each matrix, and with sequence parallelism also the tokens between matrices."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.kernels.fp8_linear import Fp8Matrix, Fp8Options
from trainyard.kernels.frozen_linear import FrozenMatrix, as_matrix
from trainyard.kernels.nf4 import Nf4Matrix
from trainyard.kernels.reference import Kernels
from trainyard.parallel.process_group import Group

TOKEN_DIM = 1
"""The dim of tokens in activations [B, T, D]."""
COLLECTIVES: dict[str, Callable[[Group, Tensor, int], Tensor]] = {
    "identity": lambda group, x, dim: x.view_as(x),
    "all_reduce": lambda group, x, dim: group.all_reduce_sum(x),
    "all_gather": lambda group, x, dim: group.all_gather(x, dim),
    "reduce_scatter": lambda group, x, dim: group.reduce_scatter(x, dim),
}


def local_chunk(x: Tensor, size: int, rank: Tensor, dim: int) -> Tensor:
    """Chunk `rank` of `size` chunks of a dim. `rank` is a tensor to keep it out of the graph, which all ranks share."""
    chunks = x.reshape(*x.shape[:dim], size, -1, *x.shape[dim + 1 :])
    return chunks.index_select(dim, rank.reshape(1)).squeeze(dim)


class Linear(nn.Module):
    """y = x W^T + b with this rank's shard of the weight, through the device's kernels and optionally in fp8."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, kernels: Kernels, fp8: Fp8Options | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.kernels, self.fp8 = kernels, fp8
        self.stored: tuple[str, ...] = ()
        """Names of the buffers with the stored form of a frozen weight; empty: the weight has its values."""

    def store(self, matrix: Nf4Matrix | Fp8Matrix) -> None:
        """Compute with this form of the weight. The weight itself keeps its shape and has no values from then on."""
        shape = self.weight.shape
        del self.weight
        self.register_buffer("weight", torch.empty(shape, device="meta"), persistent=False)
        self.stored = tuple(f"stored_{name}" for name in matrix._fields)
        for name, tensor in zip(self.stored, matrix, strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self.fp8 = self.fp8 or Fp8Options() if isinstance(matrix, Fp8Matrix) else None

    @property
    def frozen_weight(self) -> FrozenMatrix:
        return as_matrix([getattr(self, name) for name in self.stored]) if self.stored else self.weight

    @property
    def can_gather_again(self) -> bool:
        """True if a backward pass needs nothing but x, the weight and the bias."""
        return type(self) is Linear and not self.fp8 and not self.stored

    def forward(self, x: Tensor) -> Tensor:
        return self._matmul(x, self.bias)

    def matmul(self, x: Tensor) -> Tensor:
        """The matmul without the bias: tensor parallelism first reduces a row-parallel matmul over ranks."""
        return self._matmul(x, None)

    def _matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.stored:
            return self.kernels.frozen_linear(x, self.frozen_weight, bias, self.fp8)
        return self.kernels.linear(x, self.weight, bias, self.fp8)


class TensorAxis:
    """Ranks that split each matrix. With `sequence_parallel` they also split the tokens outside attention and MLP."""

    def __init__(self, group: Group | None = None, sequence_parallel: bool = False) -> None:
        self.group = group or Group()
        self.size, self.rank = self.group.size, self.group.rank
        self.sequence_parallel = sequence_parallel and self.size > 1

    def column_parallel(
        self, x: Tensor, *linears: Linear, keep_gathered: bool = False, add_bias: bool = True
    ) -> tuple[Tensor, ...]:
        """Column-parallel matmuls of one x: every token times this rank's rows of each matrix.

        Under sequence parallelism the gathered tokens, a full activation, are not saved: backward gathers them again
        while it multiplies. Pass `keep_gathered` inside a recomputed module, which would gather a third time otherwise.
        In fp8 the gathered tokens are saved, in half the bytes; and so they are for a layer that does more than one
        matmul.
        """
        # One autograd function for all matrices: each of q, k and v alone would gather the same tokens again.
        if self.sequence_parallel and not keep_gathered and all(linear.can_gather_again for linear in linears):
            tensors = [tensor for linear in linears for tensor in (linear.weight, linear.bias if add_bias else None)]
            return _ColumnParallel.apply(x, self.group, *tensors)  # type: ignore[no-untyped-call]
        x = self.gather_sum_grads(x)
        return tuple(linear(x) if add_bias else linear.matmul(x) for linear in linears)

    def reduce_output(self, x: Tensor) -> Tensor:
        """Sum a row-parallel matmul over ranks; under sequence parallelism each rank keeps only its tokens."""
        if self.sequence_parallel:
            return self._collective(x, "reduce_scatter", "all_gather")
        # The sum is equal on all ranks, and so is its gradient: backward needs no collective.
        return self._collective(x, "all_reduce", "identity")

    def gather_sum_grads(self, x: Tensor) -> Tensor:
        """Every token on every rank, before a column-parallel matmul: backward sums the gradients of all ranks."""
        return self._collective(x, "all_gather", "reduce_scatter") if self.sequence_parallel else self.copy_sum_grads(x)

    def copy_sum_grads(self, x: Tensor) -> Tensor:
        """The identity in forward, on an x that is equal on all ranks; backward sums the gradients of all ranks."""
        return self._collective(x, "identity", "all_reduce")

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks of what each computed from its heads. Backward sums the gradients of all ranks, too."""
        return self._collective(x, "all_reduce", "all_reduce")

    def gather_tokens(self, x: Tensor, rank: Tensor | None) -> Tensor:
        """Every token on every rank, for work that all ranks repeat: backward takes the tokens of `rank`."""
        return self._gather_repeated(x, rank, TOKEN_DIM) if self.sequence_parallel else x

    def local_tokens(self, x: Tensor, rank: Tensor) -> Tensor:
        """The tokens of `rank`, of a constant [..., T]."""
        return local_chunk(x, self.size, rank, x.dim() - 1) if self.sequence_parallel else x

    def gather_last_dim(self, x: Tensor, rank: Tensor | None) -> Tensor:
        """The last dim of all ranks, concatenated, for work that all ranks repeat: backward takes `rank`'s."""
        return self._gather_repeated(x, rank, x.dim() - 1) if self.size > 1 else x

    def _gather_repeated(self, x: Tensor, rank: Tensor | None, dim: int) -> Tensor:
        assert rank is not None
        return _GatherRepeated.apply(x, self.group, rank, dim)  # type: ignore[no-untyped-call]

    def _collective(self, x: Tensor, forward: str, backward: str, dim: int = TOKEN_DIM) -> Tensor:
        return x if self.size == 1 else Collective.apply(x, self.group, forward, backward, dim)  # type: ignore[no-untyped-call]


class _ColumnParallel(torch.autograd.Function):
    """Gather and multiply. Backward overlaps its two collectives with matmuls."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        # A single starred parameter: with gradients disabled, dynamo (torch 2.13) mistakes a forward with as many
        # parameter names as arguments for one without a context.
        x, group, *tensors = arguments
        ctx.group = group
        ctx.save_for_backward(x, *tensors)
        gathered = group.all_gather(x, TOKEN_DIM)
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return tuple(F.linear(gathered, weight, bias) for weight, bias in pairs if weight is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group: Group = ctx.group
        x, *tensors = ctx.saved_tensors
        # The order is what overlaps: the gather of x runs during the first matmul, whose result is reduce-scattered
        # during the second, which needs the gathered x.
        pending_x = group.start_all_gather(x)
        d_parts = (d @ weight for d, weight in zip(grads, tensors[::2], strict=True))
        d_gathered = reduce(torch.add, d_parts)  # not `sum`, which would first add 0: a pass over memory
        pending_dx = group.start_reduce_scatter_dim(d_gathered, TOKEN_DIM)
        gathered = group.finish_all_gather(pending_x, x, TOKEN_DIM).flatten(0, 1)
        weight_grads: list[Tensor | None] = []
        needed = ctx.needs_input_grad[2::2]
        for d, bias, needs_weight in zip(grads, tensors[1::2], needed, strict=True):
            flat = d.flatten(0, 1)
            weight_grads += [flat.T @ gathered if needs_weight else None, flat.sum(0) if bias is not None else None]
        return group.finish_reduce_scatter(pending_dx, d_gathered, TOKEN_DIM), None, *weight_grads


class Collective(torch.autograd.Function):
    """One of COLLECTIVES in forward, and another one on the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, forward: str, backward: str, dim: int) -> Tensor:
        ctx.group, ctx.backward_name, ctx.dim = group, backward, dim
        return COLLECTIVES[forward](group, x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return COLLECTIVES[ctx.backward_name](ctx.group, grads[0], ctx.dim), None, None, None, None


class _GatherRepeated(torch.autograd.Function):
    """Gather for work that all ranks repeat, so their gradients are equal: backward takes this rank's chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, rank: Tensor, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        ctx.save_for_backward(rank)
        return group.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rank,) = ctx.saved_tensors
        return local_chunk(grads[0], ctx.group.size, rank, ctx.dim), None, None, None

"""The module of LoRA: a linear layer with a low-rank update of each part of its weight.

M tokens, D input features, N output features, P parts with an adapter, R rank.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from trainyard.core.counter_rng import DropoutRng, RowSeeds
from trainyard.families.linear_wrappers.lora import LoraKeys
from trainyard.kernels.fp8_linear import Fp8Matrix, Fp8Options
from trainyard.kernels.frozen_linear import (
    FrozenMatrix,
    as_matrix,
    as_tensors,
    dequantize,
    frozen_dgrad,
    frozen_forward,
)
from trainyard.kernels.nf4 import Nf4Matrix
from trainyard.kernels.reference import counter_dropout
from trainyard.models.layers.dropout import dropout_site
from trainyard.models.module_factory import ModuleFactory
from trainyard.parallel.tensor_parallel import Linear

Columns = tuple[tuple[int, int], ...]
"""Start and end of the columns of y that belong to each part with an adapter."""


class LoraLinear(Linear):
    """y = x W^T + s (dropout(x) A^T) B^T + b; with DoRA, each row of the updated matrix has a trained norm."""

    site: Tensor
    weight_squares: Tensor
    """With DoRA and a stored weight, the squared norm of each of its rows, fp32."""
    row_seeds: RowSeeds | None = None
    """The row seeds of the tokens in x, which the block sets before each forward pass (`models/base.py`)."""

    def __init__(self, linear: Linear, make: ModuleFactory, name: str, options: LoraKeys) -> None:
        super().__init__(linear.weight, linear.bias, linear.kernels, linear.fp8)
        spec, weight = make.blueprint.spec(f"{name}.weight"), f"{name}.weight"
        self.scale, self.p, self.rank = options.scale, options.dropout, options.rank
        self.lora_A, self.lora_B = make.parameter(f"{name}.lora_A"), make.parameter(f"{name}.lora_B")
        self.lora_magnitude = make.parameter(f"{name}.lora_magnitude") if options.dora else None
        self.is_row_parallel, self.tp = spec.tp_dim == 1, make.tp
        self.uses_reference = not self.kernels.has_fp8_matmul
        pieces = make.blueprint.local_slices(weight, make.shard)
        adapted = {piece.name for piece in make.blueprint.local_slices(f"{name}.lora_B", make.shard)}
        columns, start = [], 0
        for piece in pieces:
            if piece.name.removesuffix("weight") + "lora_B" in adapted:
                columns.append((start, start + piece.sizes[0]))
            start += piece.sizes[0]
        self.columns: Columns = tuple(columns)
        # q, k and v read the same x and drop the same elements of it, fused or not.
        parent = name.rpartition(".")[0]
        site = dropout_site(f"{parent}.{'output' if self.is_row_parallel else 'input'}.lora")
        self.register_buffer("site", site, persistent=False)
        self.first_column = pieces[0].offsets[1]

    def store(self, matrix: Nf4Matrix | Fp8Matrix) -> None:
        super().store(matrix)
        if self.lora_magnitude is not None:
            self.register_buffer("weight_squares", _row_squares(matrix), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.lora_magnitude is None:
            return self._updated_matmul(x, self.bias)
        y = self.matmul(x)
        return y if self.bias is None else y + self.bias

    def matmul(self, x: Tensor) -> Tensor:
        y = self._updated_matmul(x, None)
        return y if self.lora_magnitude is None else y * self._row_factors(self.lora_magnitude).to(y.dtype)

    def _updated_matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        dropped = self._dropout(x)
        adapter = (self.lora_A, self.lora_B, self.columns, self.scale)
        how = tuple(self.fp8) if self.fp8 else None, self.uses_reference
        base = as_tensors(self.frozen_weight)
        return _LoraLinear.apply(x, dropped, bias, *adapter, *how, *base)  # type: ignore[no-untyped-call]

    def _dropout(self, x: Tensor) -> Tensor | None:
        """The input of the adapters, if elements of it are dropped."""
        if not (self.training and self.p):
            return None
        assert self.row_seeds is not None
        if not self.is_row_parallel or self.tp.size == 1:
            return self.kernels.add_dropout(None, x, None, DropoutRng(self.p, *self.row_seeds, self.site))
        column = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device) + self.first_column
        seeds = self.row_seeds.seed0[..., None], self.row_seeds.seed1[..., None]
        return counter_dropout(x, self.p, seeds, self.site, column)

    def _row_factors(self, magnitude: Tensor) -> Tensor:
        """Trained norm / norm of each row of W + s B A. As in PEFT, no gradient goes through the norm."""
        factors, end, rows = [], 0, torch.split(magnitude, [stop - start for start, stop in self.columns])
        for (start, stop), norms, part in zip(self.columns, self._row_norms(), rows, strict=True):
            factors += [magnitude.new_ones(start - end), part / norms.to(magnitude.dtype)]
            end = stop
        return torch.cat([*factors, magnitude.new_ones(self.weight.shape[0] - end)])

    @torch.no_grad()
    def _row_norms(self) -> tuple[Tensor, ...]:
        """The norms of the rows of W + s B A of each part, from products with A: the sum is never formed."""
        squares, first, weight = [], 0, self.frozen_weight
        squares_N = self.weight_squares if self.stored else _row_squares(weight)
        # The matmul of stored fp8 would round A.
        exact = dequantize(weight, self.lora_A.dtype) if isinstance(weight, Fp8Matrix) else weight
        products_RN = frozen_forward(self.lora_A, exact, None, None, self.uses_reference)[0].float()
        for index, (start, stop) in enumerate(self.columns):
            rows = slice(index * self.rank, (index + 1) * self.rank)
            a_RD, b_NR = self.lora_A[rows].float(), self.lora_B[first : first + stop - start].float()
            first += stop - start
            square = squares_N[start:stop] + 2 * self.scale * (products_RN[rows, start:stop].T * b_NR).sum(1)
            squares.append(square + self.scale**2 * ((b_NR @ (a_RD @ a_RD.T)) * b_NR).sum(1))
        if self.is_row_parallel and self.tp.size > 1:
            squares = [self.tp.group.all_reduce_sum(square) for square in squares]
        return tuple(square.sqrt() for square in squares)


def add_expert_adapters(experts: nn.Module, matrices: Sequence[str], make: ModuleFactory, name: str) -> float:
    """Add the adapters of the matrices of experts `name.KEY` as KEY_lora_A and KEY_lora_B, if they have any. Returns
    what their update is multiplied by; 0: there are none."""
    if f"{name}.{matrices[0]}_lora_A" not in make.blueprint:
        return 0.0
    for adapter in (f"{key}_lora_{letter}" for key in matrices for letter in "AB"):
        experts.register_parameter(adapter, make.parameter(f"{name}.{adapter}"))
    return next(options.scale for _, options in make.linear_wrappers if isinstance(options, LoraKeys))


class _LoraLinear(torch.autograd.Function):
    """The matmul with a frozen weight, however it is stored, and the update of its result, in place. Saves x, but only
    for the gradient of A, and adds both gradients of x in one buffer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropped: Tensor | None, bias: Tensor | None, a: Tensor, b: Tensor, columns: Columns,
        scale: float, fp8: Any, reference: bool, *base: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.fp8, ctx.reference, ctx.count = Fp8Options(*fp8) if fp8 else None, reference, len(base)
        weight, x_MD, adapter_x = as_matrix(base), x.flatten(0, -2), x if dropped is None else dropped
        ctx.has_dropout, ctx.columns, ctx.scale = dropped is not None, columns, scale
        update = (adapter_x.flatten(0, -2), a, b, columns, scale)
        saved: tuple[Tensor, ...] = ()
        adapted = sum(stop - start for start, stop in columns)
        if _accumulates(weight, ctx.fp8) and bias is None and adapted == weight.shape[0]:
            # The large matmul adds to the update: a pass over y less than the other way around.
            y_MN = x.new_empty(x_MD.shape[0], adapted)
            h_MR = _add_update_(y_MN, *update, beta=0)
            y_MN.addmm_(x_MD, weight.T)
        else:
            y_MN, saved = frozen_forward(x_MD, weight, bias, ctx.fp8, reference)
            h_MR = _add_update_(y_MN, *update)
        ctx.save_for_backward(adapter_x, a, b, h_MR, *base, *saved)
        return y_MN.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        adapter_x, a, b, h_MR, *tensors = ctx.saved_tensors
        base, saved = as_matrix(tensors[: ctx.count]), tuple(tensors[ctx.count :])
        dy_MN = grads[0].flatten(0, -2)
        dh_MR, da, db = _update_grads(dy_MN, adapter_x, h_MR, b, ctx.columns, ctx.scale)
        dx = d_dropped = None
        if ctx.needs_input_grad[0]:
            if ctx.has_dropout:
                dx = frozen_dgrad(dy_MN, base, saved, ctx.fp8, ctx.reference)
            elif _accumulates(base, ctx.fp8):
                dx = (dh_MR @ a).addmm_(dy_MN, base)
            else:
                dx = frozen_dgrad(dy_MN, base, saved, ctx.fp8, ctx.reference).addmm_(dh_MR, a)
            dx = dx.view(adapter_x.shape)
        if ctx.has_dropout and ctx.needs_input_grad[1]:
            d_dropped = (dh_MR @ a).view(adapter_x.shape)
        return dx, d_dropped, None, da, db, *[None] * (4 + ctx.count)


def _row_squares(weight: FrozenMatrix) -> Tensor:
    values = weight if isinstance(weight, Tensor) else dequantize(weight, torch.float32)
    return torch.linalg.vector_norm(values, dim=1, dtype=torch.float32).square()


def _accumulates(weight: FrozenMatrix, fp8: Fp8Options | None) -> TypeGuard[Tensor]:
    """True if the matmul with the weight can add to what is there."""
    return isinstance(weight, Tensor) and fp8 is None


def _add_update_(
    y_MN: Tensor, x_MD: Tensor, a: Tensor, b: Tensor, columns: Columns, scale: float, beta: int = 1
) -> Tensor:
    """Add s (x A^T) B^T to beta y, each part to its columns; returns x A^T, [M, P R]."""
    h_MR = x_MD @ a.T
    rank, first = a.shape[0] // len(columns), 0
    for (start, stop), h in zip(columns, torch.split(h_MR, rank, 1), strict=True):
        y_MN[:, start:stop].addmm_(h, b[first : first + stop - start].T, beta=beta, alpha=scale)
        first += stop - start
    return h_MR


def _update_grads(
    dy_MN: Tensor, x: Tensor, h_MR: Tensor, b: Tensor, columns: Columns, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x A^T, A and B."""
    rank = b.shape[1]
    d_parts = [dy_MN[:, start:stop] for start, stop in columns]
    b_parts = torch.split(b, [stop - start for start, stop in columns])
    dh_MR = torch.cat([d @ part for d, part in zip(d_parts, b_parts, strict=True)], 1).mul_(scale)
    # The scale is multiplied where the matrix is small.
    db = torch.cat([d.T @ (h * scale) for d, h in zip(d_parts, torch.split(h_MR, rank, 1), strict=True)])
    return dh_MR, dh_MR.T @ x.flatten(0, -2), db

"""Grouped GEMM: groups of rows with a matrix of their own, for mixtures of experts.

The rows of group e are those before `ends[e]` and not before `ends[e - 1]`. Shapes do not depend on the sizes of the
groups, so that all batches have the same graph.
"""

from typing import Any

import torch
from torch import Tensor

from trainyard import compat

BIAS_COLUMNS = 8
"""Equal columns of the gradient of a bias: a grouped GEMM takes rows of 16 bytes or more."""


@torch.library.custom_op("trainyard::grouped_linear", mutates_args=())
def grouped_linear(x_ND: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """Rows of x times the transposed matrix of their group, [N, O]."""
    if compat.has_grouped_mm(x_ND, weight_EOD):
        return compat.grouped_mm(x_ND, weight_EOD.transpose(1, 2), ends_E)
    out_NO = x_ND.new_empty(len(x_ND), weight_EOD.shape[1])
    start = 0
    for weight_OD, end in zip(weight_EOD, ends_E.tolist(), strict=True):
        torch.mm(x_ND[start:end], weight_OD.T, out=out_NO[start:end])
        start = end
    return out_NO


@torch.library.custom_op("trainyard::grouped_wgrad", mutates_args=())
def grouped_wgrad(dy_NO: Tensor, x_ND: Tensor, ends_E: Tensor) -> Tensor:
    """The gradient of the matrices, [E, O, D]; that of a group without rows is zero."""
    if compat.has_grouped_mm(x_ND, dy_NO):
        return compat.grouped_mm(dy_NO.T, x_ND, ends_E)
    out_EOD = x_ND.new_empty(len(ends_E), dy_NO.shape[1], x_ND.shape[1])
    start = 0
    for out_OD, end in zip(out_EOD, ends_E.tolist(), strict=True):
        torch.mm(dy_NO[start:end].T, x_ND[start:end], out=out_OD)
        start = end
    return out_EOD


def add_grouped_bias(y_NO: Tensor, bias_EO: Tensor, ends_E: Tensor) -> Tensor:
    """Add to each row the bias of its group."""
    out: Tensor = _AddGroupedBias.apply(y_NO, bias_EO, ends_E)  # type: ignore[no-untyped-call]
    return out


class _AddGroupedBias(torch.autograd.Function):
    """The sums over groups in backward are a grouped GEMM with ones, because atomic additions come in any order."""

    @staticmethod
    def forward(ctx: Any, y_NO: Tensor, bias_EO: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(ends_E)
        row_N = torch.arange(y_NO.shape[0], dtype=ends_E.dtype, device=y_NO.device)
        return y_NO + bias_EO.index_select(0, torch.searchsorted(ends_E, row_N, right=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (ends_E,) = ctx.saved_tensors
        ones = grads[0].new_ones(grads[0].shape[0], BIAS_COLUMNS)
        return grads[0], grouped_wgrad(grads[0].contiguous(), ones, ends_E)[..., 0], None


@grouped_linear.register_fake
def _(x_ND: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], weight_EOD.shape[1])


@grouped_wgrad.register_fake
def _(dy_NO: Tensor, x_ND: Tensor, ends_E: Tensor) -> Tensor:
    return x_ND.new_empty(ends_E.shape[0], dy_NO.shape[1], x_ND.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
    x_ND, weight_EOD, ends_E = ctx.saved_tensors
    dy_NO = dy_NO.contiguous()
    dx_ND = grouped_linear(dy_NO, weight_EOD.transpose(1, 2), ends_E) if ctx.needs_input_grad[0] else None
    return dx_ND, grouped_wgrad(dy_NO, x_ND, ends_E) if ctx.needs_input_grad[1] else None, None


grouped_linear.register_autograd(_backward, setup_context=_setup_context)

"""A linear layer whose matrix is frozen: y = x W^T + bias, and in backward dx = dy W. x is not saved.

W is stored in one of three ways:

- a plain tensor; with fp8, quantized at each use (fp8_linear.py);
- `Nf4Matrix`, 4.13 bits per weight: each matmul dequantizes it into a scratch buffer in the dtype of x;
- `Fp8Matrix`, 8 bits per weight: quantized once, with power-of-two scales. Forward quantizes x to e4m3 and multiplies
  in fp8, and backward quantizes dy to e5m2 or keeps it in bf16. Hopper contracts fp8 only along the rows of both
  operands, so that dy W in fp8 needs a transposed copy of W, in a scratch buffer too.

Scratch buffers exist inside of one operator only. A compiler thus cannot save a dequantized matrix for backward, and
the allocator gives the same memory to every layer.

Shapes: M tokens, D input features, N output features.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.compat import has_memory, scaled_mm
from trainyard.kernels.custom_op import WORKSPACE_BYTES, kernel_op
from trainyard.kernels.fp8_linear import (
    Fp8Matrix,
    Fp8Options,
    check_sizes,
    compute_amax,
    fp8_linear,
    matmul,
    power_of_two_scales,
    quantize,
)
from trainyard.kernels.nf4 import Nf4Matrix, dequantize_nf4

FrozenMatrix = Tensor | Nf4Matrix | Fp8Matrix


def frozen_linear(
    x: Tensor, weight: FrozenMatrix, bias_N: Tensor | None = None, fp8: Fp8Options | None = None,
    reference: bool = False,
) -> Tensor:  # fmt: skip
    """F.linear of [..., D]; the bias may be trained.

    An `Fp8Matrix` needs `fp8`, whose scaling is that of the matrix; `Nf4Matrix` ignores it. `reference` is the same in
    plain torch, on any device: the same numbers from nf4, and fp8 matmuls that accumulate in fp32.
    """
    if isinstance(weight, Tensor):
        weight = weight.detach()
        return fp8_linear(x, weight, bias_N, fp8, reference) if fp8 else F.linear(x, weight, bias_N)
    x_MD = x.reshape(-1, x.shape[-1])
    if isinstance(weight, Nf4Matrix):
        y_MN = _Nf4Linear.apply(x_MD, bias_N, reference, *weight)  # type: ignore[no-untyped-call]
    else:
        assert fp8 is not None
        assert (fp8.scaling == "row") == (weight.inverse_scale.numel() > 1)
        y_MN = _StoredFp8Linear.apply(x_MD, bias_N, *fp8, reference, *weight)  # type: ignore[no-untyped-call]
    return y_MN.view(*x.shape[:-1], -1)


def quantize_frozen(
    weight_ND: Tensor, scaling: str, reduce_max: Callable[[Tensor], Tensor] = lambda amax: amax
) -> Fp8Matrix:
    """Round a matrix to e4m3 with one scale, or one per row. `reduce_max` is given the amax, fp32 [1] or [N], and
    returns that of the full matrix or its full rows if ranks split it."""
    check_sizes(weight_ND)
    amax = reduce_max(weight_ND.abs().amax(1).float() if scaling == "row" else weight_ND.abs().amax().float().view(1))
    scale, inverse_scale = power_of_two_scales(amax.view(torch.int32), torch.float8_e4m3fn)
    return Fp8Matrix((weight_ND.float() * scale[:, None]).to(torch.float8_e4m3fn), inverse_scale)


class _Nf4Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, bias_N: Tensor | None, reference: bool, *weight: Tensor) -> Tensor:
        ctx.save_for_backward(*weight)
        ctx.reference, ctx.bias_dtype = reference, None if bias_N is None else bias_N.dtype
        return nf4_matmul(x_MD.contiguous(), *weight, bias_N, False, reference)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy_MN = grads[0].contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            dx = nf4_matmul(dy_MN, *ctx.saved_tensors, None, True, ctx.reference)
        return dx, _bias_grad(ctx, dy_MN), None, *[None] * len(Nf4Matrix._fields)


class _StoredFp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, bias_N: Tensor | None, scaling: str, grad_format: str, fast_accum: bool,
        reference: bool, *weight: Tensor,
    ) -> Tensor:  # fmt: skip
        x_MD = x_MD.contiguous()
        per_row = scaling == "row"
        ctx.save_for_backward(*weight)
        ctx.how = per_row, grad_format == "e5m2", reference
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        x, _ = quantize(x_MD, compute_amax(x_MD, per_row, False, reference), torch.float8_e4m3fn, per_row, reference)
        return matmul(x, Fp8Matrix(*weight), bias_N, fast_accum, reference, x_MD.dtype)[: x_MD.shape[0]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy_MN = grads[0].contiguous()
        d_bias = _bias_grad(ctx, dy_MN)
        if not ctx.needs_input_grad[0]:
            return None, d_bias, *[None] * 6
        per_row, fp8_grads, reference = ctx.how
        values_ND, scale = ctx.saved_tensors
        if per_row or not fp8_grads:
            # The matmul sums over rows of W: their scales, which are powers of two, go to dy without rounding.
            dy_MN = dy_MN * scale.to(dy_MN.dtype)
        if not fp8_grads:
            return cast_matmul(dy_MN, values_ND), d_bias, *[None] * 6
        amax = compute_amax(dy_MN, per_row, False, reference)
        dy, _ = quantize(dy_MN, amax, torch.float8_e5m2, per_row, reference)
        scale_D = scale.new_ones(values_ND.shape[1]) if per_row else scale
        dx = fp8_dgrad(*dy, values_ND, scale_D, dy_MN.dtype, reference)[: dy_MN.shape[0]]
        return dx, d_bias, *[None] * 6


def _bias_grad(ctx: Any, dy_MN: Tensor) -> Tensor | None:
    return dy_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None


@kernel_op
def nf4_matmul(
    x: Tensor, codes: Tensor, absmax_codes: Tensor, row_starts: Tensor, scales: Tensor, offsets: Tensor,
    tables: Tensor, bias: Tensor | None, transposed: bool, reference: bool,
) -> Tensor:  # fmt: skip
    """x W^T + bias, or x W if `transposed`, of an `Nf4Matrix`, in the dtype of x."""
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    if not has_memory(x):
        return x.new_empty(x.shape[0], columns if transposed else rows)
    matrix = Nf4Matrix(codes, absmax_codes, row_starts, scales, offsets, tables)
    if reference:
        weight = dequantize_nf4(matrix, x.dtype)
    else:
        from trainyard.kernels.triton import nf4 as kernels

        kernels.dequantize(*matrix, weight := x.new_empty(rows, columns))
    return x @ weight if transposed else F.linear(x, weight, bias)


@kernel_op
def cast_matmul(x: Tensor, values: Tensor) -> Tensor:
    """x @ values of an fp8 matrix, in the dtype of x."""
    return x @ values.to(x.dtype) if has_memory(x) else x.new_empty(x.shape[0], values.shape[1])


@kernel_op
def fp8_dgrad(
    dy: Tensor, dy_scale: Tensor, values: Tensor, scale: Tensor, dtype: torch.dtype, reference: bool
) -> Tensor:
    """dy @ values in `dtype` (of the kernels, bf16), with inverse scales."""
    if not has_memory(dy):
        return dy.new_empty(dy.shape[0], values.shape[1], dtype=dtype)
    if reference:
        return ((dy.float() @ values.float()) * (dy_scale[:, None] * scale)).to(dtype)
    from trainyard.kernels.triton.fp8_cast import transpose

    assert dtype == torch.bfloat16
    # As in fp8_linear.py, gradients never use the short accumulators.
    return scaled_mm(dy, transpose(values).t(), dy_scale[:, None], scale[None, :], None, False)


WORKSPACE_BYTES[torch.ops.trainyard.nf4_matmul.default] = lambda x, codes, *_, **__: (
    2 * codes.numel() * x.element_size()
)
WORKSPACE_BYTES[torch.ops.trainyard.cast_matmul.default] = lambda x, values: values.numel() * x.element_size()
WORKSPACE_BYTES[torch.ops.trainyard.fp8_dgrad.default] = lambda dy, dy_scale, values, *_, **__: values.nbytes

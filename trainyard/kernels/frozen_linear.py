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

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.compat import has_memory, scaled_mm
from trainyard.kernels.custom_op import WORKSPACE_BYTES, kernel_op
from trainyard.kernels.fp8_linear import (
    Amax,
    Fp8Matrix,
    Fp8Options,
    check_sizes,
    compute_amax,
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
    how = tuple(fp8) if fp8 else None, reference
    x_MD = x.reshape(-1, x.shape[-1])
    y_MN = _FrozenLinear.apply(x_MD, bias_N, *how, *as_tensors(weight))  # type: ignore[no-untyped-call]
    return y_MN.view(*x.shape[:-1], -1)


def frozen_forward(
    x_MD: Tensor, weight: FrozenMatrix, bias_N: Tensor | None, fp8: Fp8Options | None, reference: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """y, and what `frozen_dgrad` needs besides the matrix. For autograd functions: no gradient goes through it."""
    x_MD = x_MD.contiguous()
    if isinstance(weight, Nf4Matrix):
        return nf4_matmul(x_MD, *weight, bias_N, False, reference), ()
    if fp8 is None:
        assert isinstance(weight, Tensor)
        return F.linear(x_MD, weight, bias_N), ()
    per_row = fp8.scaling == "row"
    saved: tuple[Tensor, ...] = ()
    if isinstance(weight, Tensor):
        check_sizes(weight)
        saved = compute_amax(weight, per_row, fp8.grad_format == "e5m2", reference)
        weight, _ = quantize(weight, Amax(*saved), torch.float8_e4m3fn, per_row, reference)
    assert per_row == (weight.inverse_scale.numel() > 1)
    x, _ = quantize(x_MD, compute_amax(x_MD, per_row, False, reference), torch.float8_e4m3fn, per_row, reference)
    return matmul(x, weight, bias_N, fp8.fast_accum, reference, x_MD.dtype)[: x_MD.shape[0]], saved


def frozen_dgrad(
    dy_MN: Tensor, weight: FrozenMatrix, saved: tuple[Tensor, ...], fp8: Fp8Options | None, reference: bool
) -> Tensor:
    """dx, in memory of its own."""
    dy_MN = dy_MN.contiguous()
    if isinstance(weight, Nf4Matrix):
        return nf4_matmul(dy_MN, *weight, None, True, reference)
    per_row, fp8_grads = fp8 is not None and fp8.scaling == "row", fp8 is not None and fp8.grad_format == "e5m2"
    if isinstance(weight, Fp8Matrix) and (per_row or not fp8_grads):
        # The matmul sums over rows of W: their scales, which are powers of two, go to dy without rounding.
        dy_MN = dy_MN * weight.inverse_scale.to(dy_MN.dtype)
    if not fp8_grads:
        return dy_MN @ weight if isinstance(weight, Tensor) else cast_matmul(dy_MN, weight.values)
    amax = compute_amax(dy_MN, per_row, False, reference)
    dy, _ = quantize(dy_MN, amax, torch.float8_e5m2, per_row, reference)
    if isinstance(weight, Tensor):
        _, transposed = quantize(weight, Amax(*saved), torch.float8_e4m3fn, per_row, reference, False, True)
        # As in fp8_linear.py, gradients never use the short accumulators.
        return matmul(dy, transposed, None, False, reference, dy_MN.dtype)[: dy_MN.shape[0]]
    scale_D = dy.inverse_scale.new_ones(weight.values.shape[1]) if per_row else weight.inverse_scale
    return fp8_dgrad(*dy, weight.values, scale_D, dy_MN.dtype, reference)[: dy_MN.shape[0]]


def as_tensors(weight: FrozenMatrix) -> tuple[Tensor, ...]:
    """The tensors of a matrix, as arguments of an autograd function; `as_matrix` is the inverse."""
    return (weight,) if isinstance(weight, Tensor) else tuple(weight)


def as_matrix(tensors: Sequence[Tensor]) -> FrozenMatrix:
    if len(tensors) == 1:
        return tensors[0]
    return Fp8Matrix(*tensors) if len(tensors) == len(Fp8Matrix._fields) else Nf4Matrix(*tensors)


def dequantize(weight: FrozenMatrix, dtype: torch.dtype) -> Tensor:
    """The values that a matrix stands for."""
    if isinstance(weight, Nf4Matrix):
        return dequantize_nf4(weight, dtype)
    if isinstance(weight, Fp8Matrix):
        return (weight.values.float() * weight.inverse_scale[:, None]).to(dtype)
    return weight.to(dtype)


def quantize_frozen(
    weight_ND: Tensor, scaling: str, reduce_max: Callable[[Tensor], Tensor] = lambda amax: amax
) -> Fp8Matrix:
    """Round a matrix to e4m3 with one scale, or one per row. `reduce_max` is given the amax, fp32 [1] or [N], and
    returns that of the full matrix or its full rows if ranks split it."""
    check_sizes(weight_ND)
    amax = reduce_max(weight_ND.abs().amax(1).float() if scaling == "row" else weight_ND.abs().amax().float().view(1))
    scale, inverse_scale = power_of_two_scales(amax.view(torch.int32), torch.float8_e4m3fn)
    return Fp8Matrix((weight_ND.float() * scale[:, None]).to(torch.float8_e4m3fn), inverse_scale)


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, bias_N: Tensor | None, fp8: Any, reference: bool, *tensors: Tensor) -> Tensor:
        ctx.fp8, ctx.reference, ctx.count = Fp8Options(*fp8) if fp8 else None, reference, len(tensors)
        ctx.bias_dtype = None if bias_N is None else bias_N.dtype
        y_MN, saved = frozen_forward(x_MD, as_matrix(tensors), bias_N, ctx.fp8, reference)
        ctx.save_for_backward(*tensors, *saved)
        return y_MN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy_MN, all_saved = grads[0], ctx.saved_tensors
        tensors, saved = all_saved[: ctx.count], all_saved[ctx.count :]
        dx = d_bias = None
        if ctx.needs_input_grad[0]:
            dx = frozen_dgrad(dy_MN, as_matrix(tensors), saved, ctx.fp8, ctx.reference)
        if ctx.needs_input_grad[1]:
            d_bias = dy_MN.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, d_bias, None, None, *[None] * ctx.count


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

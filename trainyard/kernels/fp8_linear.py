"""A linear whose matrix products are in fp8: y = x W^T, and in backward dx = dy W and dW = dy^T x.

x and W go to e4m3 and dy to e5m2, each multiplied by a scale that comes from its own largest value at each use: without
a history a run resumes exactly. Scales are powers of two. Multiplying by one rounds nothing, so another largest value
(of another micro batch, of another rank's share) changes only what lies under the smallest normal number of the format,
and results depend on the layout as little as in bf16. Where an inf or nan goes in, nan comes out.

`linear` casts by Triton kernels and multiplies by cuBLAS; `linear_plain` is the same in plain torch, for any device.

Bytes: a cast reads 2 of each element for the maximum, 2 again, and writes 1 for each of two layouts. x is kept for
backward in e4m3, 1 byte instead of 2. W is not kept but cast anew in backward, by the maximum that forward found: that
reads 2 bytes of a weight and writes 1. To keep it would take 1 byte of each weight for each micro batch under way, and
save 2 of the 8 that move.

Shapes: M tokens, D features in, N features out, P parts.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from trainyard.compat import scaled_mm
from trainyard.core.errors import UserError

FAST_ACCUM_BACKWARD = False
"""Whether backward's products add up in short accumulators, as `Fp8.fast` says for forward's."""
SIZE_MULTIPLE = 16
"""Of this are the sizes of fp8 matrices; tokens are padded to it."""
MAX_AMAX_BLOCKS, AMAX_BLOCK_ELEMENTS = 1024, 8192
"""At most so many maxima of a tensor, of at least so many elements each."""
MAX_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""The largest number of a format is 1.75 * 2^TOP."""


class Fp8Options(NamedTuple):
    scaling: Literal["tensor", "row"] = "tensor"
    """One scale for a tensor, or one for each row of a product's left operand and for each column of its right one."""
    grad_format: Literal["e5m2", "bf16"] = "e5m2"
    """What dy is multiplied as. With bf16 the products of backward are in bf16, and x is kept as it came."""
    fast_accum: bool = True
    """Whether the tensor cores add up forward's products in their own short accumulators."""


class Amax(NamedTuple):
    """The largest magnitudes of a matrix as bits of fp32, in int32."""

    rows: Tensor
    """[M], or by tensor [P] maxima of parts of it, whatever the parts. The kernel that makes a matrix may give these: a
    few hundred, as each program of the cast reads them all."""
    columns: Tensor
    """[D], or [0] if nobody asked."""


class Fp8Matrix(NamedTuple):
    """A matrix [R, S] in fp8 whose rows are what a product sums over, and its inverse scales, [R] or [1]."""

    values: Tensor
    inverse_scale: Tensor


def fp8_linear(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None, fp8: Fp8Options) -> Tensor:
    """F.linear of bf16 [..., D] on a device with fp8 products, with any number of tokens."""
    return _linear(x, weight_ND, bias_N, fp8, False)


def fp8_linear_reference(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None, fp8: Fp8Options) -> Tensor:
    """`linear` of bf16 or fp32 on any device: the same numbers, but that products are summed in fp32."""
    return _linear(x, weight_ND, bias_N, fp8, True)


def _linear(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None, fp8: Fp8Options, plain: bool) -> Tensor:
    N, D = weight_ND.shape
    if N % SIZE_MULTIPLE or D % SIZE_MULTIPLE:
        raise UserError(f"a matrix of {N} x {D} on this rank: fp8 products take multiples of {SIZE_MULTIPLE} only")
    y_MN = _Fp8Linear.apply(x.reshape(-1, D), weight_ND, bias_N, *fp8, plain)  # type: ignore[no-untyped-call]
    return y_MN.view(*x.shape[:-1], N)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        weight_ND: Tensor,
        bias_N: Tensor | None,
        scaling: str,
        gradients: str,
        fast: bool,
        plain: bool,
    ) -> Tensor:
        x_MD, weight_ND = x_MD.contiguous(), weight_ND.contiguous()
        by_row, eight = scaling == "row", gradients == "e5m2"
        for_x, for_weight = (needed and eight for needed in ctx.needs_input_grad[:2])
        most_x = compute_amax(x_MD, by_row, for_weight, plain)
        most_weight = compute_amax(weight_ND, by_row, for_x, plain)
        x, turned_x = quantize(x_MD, most_x, torch.float8_e4m3fn, by_row, plain, transposed=for_weight)
        weight, _ = quantize(weight_ND, most_weight, torch.float8_e4m3fn, by_row, plain)
        ctx.how = by_row, eight, plain
        ctx.dtypes = weight_ND.dtype, None if bias_N is None else bias_N.dtype
        if eight:
            ctx.save_for_backward(*turned_x, *(most_weight if for_x else (None, None)), weight_ND if for_x else None)
        else:
            needs_x, needs_weight, *_ = ctx.needs_input_grad
            ctx.save_for_backward(x_MD if needs_weight else None, weight_ND if needs_x else None)
        return matmul(x, weight, bias_N, fast, plain, x_MD.dtype)[: x_MD.shape[0]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy_MN = grads[0].contiguous()
        for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
        by_row, eight, plain = ctx.how
        weight_dtype, bias_dtype = ctx.dtypes
        dx = d_weight = None
        if not eight:
            x_MD, weight_ND = ctx.saved_tensors
            dx = dy_MN @ weight_ND if for_x else None
            d_weight = dy_MN.t() @ x_MD if for_weight else None
        elif for_x or for_weight:
            x_values, x_inverse, most, most_columns, weight_ND = ctx.saved_tensors
            most_dy = compute_amax(dy_MN, by_row, for_weight, plain)
            dy, turned_dy = quantize(dy_MN, most_dy, torch.float8_e5m2, by_row, plain, for_x, for_weight)
            if for_x:
                most_weight = Amax(most, most_columns)
                _, weight = quantize(weight_ND, most_weight, torch.float8_e4m3fn, by_row, plain, False, True)
                dx = matmul(dy, weight, None, FAST_ACCUM_BACKWARD, plain, dy_MN.dtype)[: dy_MN.shape[0]]
            if for_weight:
                d_weight = matmul(
                    turned_dy, Fp8Matrix(x_values, x_inverse), None, FAST_ACCUM_BACKWARD, plain, weight_dtype
                )
        d_bias = dy_MN.sum(0, dtype=torch.float32).to(bias_dtype) if for_bias else None
        return dx, d_weight, d_bias, None, None, None, None


def compute_amax(x_MD: Tensor, per_row: bool, columns: bool = False, reference: bool = False) -> Amax:
    """For the tensor, or for each row and if asked for each column."""
    if not reference:
        return Amax(*fp8_amax(x_MD, per_row, columns))
    size = x_MD.detach().abs()
    rows = size.amax(1) if per_row else size.amax().view(1)
    nothing = size.new_empty(0)
    return Amax(_abs_bits(rows), _abs_bits(size.amax(0) if per_row and columns else nothing))


def quantize(
    x_MD: Tensor,
    amax: Amax,
    dtype: torch.dtype,
    per_row: bool,
    reference: bool = False,
    direct: bool = True,
    transposed: bool = False,
) -> tuple[Fp8Matrix, Fp8Matrix]:
    """To fp8 [M, D] and, `turned`, [D, M], M padded unless plain. What is not asked for is empty."""
    if not reference:
        out_MD, out_DM, inverse, inverse_D = fp8_cast(x_MD, *amax, dtype, per_row, direct, transposed)
        return Fp8Matrix(out_MD, inverse), Fp8Matrix(out_DM, inverse_D if per_row else inverse)
    nothing = x_MD.new_empty(0, dtype=dtype)
    scale, inverse = power_of_two_scales(amax.rows, dtype)
    scale_D, inverse_D = power_of_two_scales(amax.columns, dtype) if per_row else (scale, inverse)
    out_MD = (x_MD.float() * scale[:, None]).to(dtype) if direct else nothing
    if not transposed:
        return Fp8Matrix(out_MD, inverse), Fp8Matrix(nothing, inverse)
    return Fp8Matrix(out_MD, inverse), Fp8Matrix((x_MD.float() * scale_D).to(dtype).t(), inverse_D)


def matmul(
    left: Fp8Matrix, right: Fp8Matrix, bias: Tensor | None, fast_accum: bool, reference: bool, dtype: torch.dtype
) -> Tensor:
    """left right^T + bias, rounded once."""
    if not reference:
        return fp8_matmul(*left, *right, bias, fast_accum)
    y = left.values.float() @ right.values.float().t()
    y = y * (left.inverse_scale[:, None] * right.inverse_scale)
    return (y if bias is None else y + bias.float()).to(dtype)


def power_of_two_scales(bits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest power of two that keeps a magnitude within the format, and its inverse, both normal in fp32: so 2^126
    at most. 1 for a magnitude of 0, nan for inf and nan."""
    exponent = MAX_EXPONENT[dtype] + 254 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).int()
    exponent = torch.where(bits == 0, 127, exponent.clamp(max=253))
    finite = bits < 0x7F800000
    scale, inverse = (torch.where(finite, power << 23, 0x7FC00000) for power in (exponent, 254 - exponent))
    return scale.int().view(torch.float32), inverse.int().view(torch.float32)


def _abs_bits(size: Tensor) -> Tensor:
    return size.float().view(torch.int32) & 0x7FFFFFFF


@torch.library.custom_op("trainyard::fp8_amax", mutates_args=())
def fp8_amax(x_MD: Tensor, by_row: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """`Most` of a bf16 matrix."""
    from trainyard.kernels.triton import fp8_cast as kernels

    assert x_MD.dtype == torch.bfloat16
    most, most_D = _empty_amax(x_MD, by_row, columns)
    if by_row:
        kernels.amax_rows(x_MD.contiguous(), most, most_D)
    else:
        kernels.amax(x_MD.contiguous(), most)
    return most, most_D


@torch.library.custom_op("trainyard::fp8_cast", mutates_args=())
def fp8_cast(
    x_MD: Tensor, most: Tensor, most_D: Tensor, dtype: torch.dtype, by_row: bool, as_is: bool, turned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A bf16 matrix as it lies and transposed, and the inverse scales of both (by tensor: the first for both)."""
    from trainyard.kernels.triton import fp8_cast as kernels

    assert x_MD.dtype == torch.bfloat16
    out = _empty_cast(x_MD, dtype, by_row, as_is, turned)
    kernels.cast_to_fp8(x_MD.contiguous(), most, most_D, *out, MAX_EXPONENT[dtype], by_row)
    return out


@torch.library.custom_op("trainyard::fp8_multiply", mutates_args=())
def fp8_matmul(
    left: Tensor, left_inverse: Tensor, right: Tensor, right_inverse: Tensor, bias: Tensor | None, fast: bool
) -> Tensor:
    """left right^T + bias in bf16. Opaque, so that a compiled model multiplies by the same kernel as an eager one."""
    return scaled_mm(left, right.t(), left_inverse[:, None], right_inverse[None, :], bias, fast)


@fp8_amax.register_fake
def _empty_amax(x_MD: Tensor, by_row: bool, columns: bool) -> tuple[Tensor, Tensor]:
    M, D = x_MD.shape
    parts = M if by_row else min(MAX_AMAX_BLOCKS, -(-M * D // AMAX_BLOCK_ELEMENTS))
    most = x_MD.new_empty(parts, dtype=torch.int32)
    return most, most.new_empty(D if by_row and columns else 0)


@fp8_cast.register_fake
def _(x: Tensor, _most: Tensor, _most_D: Tensor, dtype: torch.dtype, by_row: bool, as_is: bool, turned: bool) -> Any:
    return _empty_cast(x, dtype, by_row, as_is, turned)


def _empty_cast(
    x_MD: Tensor, dtype: torch.dtype, by_row: bool, as_is: bool, turned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    M, D = x_MD.shape
    padded = -(-M // SIZE_MULTIPLE) * SIZE_MULTIPLE
    return (
        x_MD.new_empty((padded, D) if as_is else (0, D), dtype=dtype),
        x_MD.new_empty((D, padded) if turned else (D, 0), dtype=dtype),
        x_MD.new_empty(1 if not by_row else padded if as_is else 0, dtype=torch.float32),
        x_MD.new_empty(D if by_row and turned else 0, dtype=torch.float32),
    )


@fp8_matmul.register_fake
def _(left: Tensor, _left_inverse: Tensor, right: Tensor, *_: Any) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[0], dtype=torch.bfloat16)

"""A linear layer whose matrix multiplications are in fp8: y = x W^T, and in backward dx = dy W and dW = dy^T x.

x and W are quantized to e4m3 and dy to e5m2. Each use computes its scale from the current amax: without an amax history
a run resumes exactly. Scales are powers of two, so scaling itself never rounds. A different amax (another micro batch,
another rank's shard) therefore changes only values below the smallest normal number of the format, and results depend
on the layout as little as in bf16. An inf or nan in the input gives nan in the output.

`fp8_linear` quantizes with Triton kernels and multiplies with cuBLAS, or does the same in plain torch for any device.

Memory traffic: quantizing reads 2 bytes per element for the amax, 2 again for the cast, and writes 1 for each of two
layouts. x is saved for backward in e4m3, 1 byte per element instead of 2. W is not saved but quantized again in
backward with the amax of forward: 2 bytes read and 1 written per weight. Saving it would take 1 byte per weight for
each micro batch in flight and avoid 2 of the 8 bytes that move.

Shapes: M tokens, D input features, N output features, P amax blocks.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from trainyard.compat import has_memory, scaled_mm
from trainyard.core.errors import UserError
from trainyard.kernels.custom_op import kernel_op

SIZE_MULTIPLE = 16
"""Sizes of fp8 matrices are multiples of this; tokens are padded."""
MAX_AMAX_BLOCKS, AMAX_BLOCK_ELEMENTS = 1024, 8192
"""A tensor-wise amax has at most this many blocks, of at least this many elements each."""
MAX_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""Exponent of the largest number of a format, which is 1.75 * 2^exponent."""


class Fp8Options(NamedTuple):
    """fp8 settings of a linear layer."""

    scaling: Literal["tensor", "row"] = "tensor"
    """One scale per tensor, or one per row of a matmul's left operand and per column of its right operand."""
    grad_format: Literal["e5m2", "bf16"] = "e5m2"
    """Format of dy. With bf16 the matmuls of backward are in bf16, and x is saved unquantized."""
    fast_accum: bool = True
    """True if forward accumulates in the tensor cores' short accumulators."""


class Amax(NamedTuple):
    """Largest magnitudes of a matrix, as the bits of fp32 in int32."""

    rows: Tensor
    """[M] per row, or [P] maxima of any blocks that cover the tensor. The kernel that produces a matrix may supply
    these; a few hundred at most, as each program of the cast reads them all."""
    columns: Tensor
    """[D] per column, or [0] if not requested."""


class Fp8Matrix(NamedTuple):
    """A matrix [R, S] in fp8, contracted along its rows, with its inverse scales, [R] or [1]."""

    values: Tensor
    inverse_scale: Tensor


def fp8_linear(x: Tensor, weight_ND: Tensor, bias_N: Tensor | None, fp8: Fp8Options, reference: bool = False) -> Tensor:
    """F.linear of bf16 [..., D], for any number of tokens, on a device with fp8 matrix multiplications.

    `reference` is the same in plain torch for bf16 or fp32 on any device: the same numbers, except that matmuls
    accumulate in fp32.
    """
    check_sizes(weight_ND)
    N, D = weight_ND.shape
    y_MN = _Fp8Linear.apply(x.reshape(-1, D), weight_ND, bias_N, *fp8, reference)  # type: ignore[no-untyped-call]
    return y_MN.view(*x.shape[:-1], N)


def check_sizes(weight_ND: Tensor) -> None:
    N, D = weight_ND.shape
    if N % SIZE_MULTIPLE or D % SIZE_MULTIPLE:
        raise UserError(f"this rank's {N} x {D} matrix: fp8 needs both sizes to be multiples of {SIZE_MULTIPLE}")


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, weight_ND: Tensor, bias_N: Tensor | None,
        scaling: str, grad_format: str, fast_accum: bool, reference: bool,
    ) -> Tensor:  # fmt: skip
        x_MD, weight_ND = x_MD.contiguous(), weight_ND.contiguous()
        per_row, fp8_grads = scaling == "row", grad_format == "e5m2"
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        needs_dx, needs_dw = needs_x and fp8_grads, needs_weight and fp8_grads
        amax_x = compute_amax(x_MD, per_row, needs_dw, reference)
        amax_weight = compute_amax(weight_ND, per_row, needs_dx, reference)
        x, x_transposed = quantize(x_MD, amax_x, torch.float8_e4m3fn, per_row, reference, transposed=needs_dw)
        weight, _ = quantize(weight_ND, amax_weight, torch.float8_e4m3fn, per_row, reference)
        ctx.how = per_row, fp8_grads, reference
        ctx.dtypes = weight_ND.dtype, None if bias_N is None else bias_N.dtype
        if fp8_grads:
            weight_to_save = (*amax_weight, weight_ND) if needs_dx else (None, None, None)
            ctx.save_for_backward(*x_transposed, *weight_to_save)
        else:
            ctx.save_for_backward(x_MD if needs_weight else None, weight_ND if needs_x else None)
        return matmul(x, weight, bias_N, fast_accum, reference, x_MD.dtype)[: x_MD.shape[0]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy_MN = grads[0].contiguous()
        needs_dx, needs_dw, needs_d_bias, *_ = ctx.needs_input_grad
        per_row, fp8_grads, reference = ctx.how
        weight_dtype, bias_dtype = ctx.dtypes
        dx = d_weight = None
        if not fp8_grads:
            x_MD, weight_ND = ctx.saved_tensors
            dx = dy_MN @ weight_ND if needs_dx else None
            d_weight = dy_MN.t() @ x_MD if needs_dw else None
        elif needs_dx or needs_dw:
            x_values, x_scale, amax, amax_columns, weight_ND = ctx.saved_tensors
            amax_dy = compute_amax(dy_MN, per_row, needs_dw, reference)
            dy, dy_transposed = quantize(dy_MN, amax_dy, torch.float8_e5m2, per_row, reference, needs_dx, needs_dw)
            # Backward never uses the short accumulators that `fast_accum` selects for forward.
            if needs_dx:
                amax_weight = Amax(amax, amax_columns)
                _, weight = quantize(weight_ND, amax_weight, torch.float8_e4m3fn, per_row, reference, False, True)
                dx = matmul(dy, weight, None, False, reference, dy_MN.dtype)[: dy_MN.shape[0]]
            if needs_dw:
                d_weight = matmul(dy_transposed, Fp8Matrix(x_values, x_scale), None, False, reference, weight_dtype)
        d_bias = dy_MN.sum(0, dtype=torch.float32).to(bias_dtype) if needs_d_bias else None
        return dx, d_weight, d_bias, None, None, None, None


def compute_amax(x_MD: Tensor, per_row: bool, columns: bool = False, reference: bool = False) -> Amax:
    """Amax of the tensor, or of each row and, with `columns`, of each column."""
    if not reference:
        return Amax(*fp8_amax(x_MD, per_row, columns))
    magnitude = x_MD.detach().abs()
    rows = magnitude.amax(1) if per_row else magnitude.amax().view(1)
    empty = magnitude.new_empty(0)
    return Amax(_abs_bits(rows), _abs_bits(magnitude.amax(0) if per_row and columns else empty))


def quantize(
    x_MD: Tensor,
    amax: Amax,
    dtype: torch.dtype,
    per_row: bool,
    reference: bool = False,
    direct: bool = True,
    transposed: bool = False,
) -> tuple[Fp8Matrix, Fp8Matrix]:
    """Quantize to fp8: [M, D] if `direct`, [D, M] if `transposed`; the other is empty. M is padded, except in the
    reference."""
    if not reference:
        out_MD, out_DM, inverse_scale, inverse_scale_D = fp8_cast(x_MD, *amax, dtype, per_row, direct, transposed)
        return Fp8Matrix(out_MD, inverse_scale), Fp8Matrix(out_DM, inverse_scale_D if per_row else inverse_scale)
    empty = x_MD.new_empty(0, dtype=dtype)
    scale, inverse_scale = power_of_two_scales(amax.rows, dtype)
    scale_D, inverse_scale_D = power_of_two_scales(amax.columns, dtype) if per_row else (scale, inverse_scale)
    out_MD = (x_MD.float() * scale[:, None]).to(dtype) if direct else empty
    if not transposed:
        return Fp8Matrix(out_MD, inverse_scale), Fp8Matrix(empty, inverse_scale)
    return Fp8Matrix(out_MD, inverse_scale), Fp8Matrix((x_MD.float() * scale_D).to(dtype).t(), inverse_scale_D)


def matmul(
    left: Fp8Matrix, right: Fp8Matrix, bias: Tensor | None, fast_accum: bool, reference: bool, dtype: torch.dtype
) -> Tensor:
    """left @ right^T + bias, rounded once."""
    if not reference:
        return fp8_matmul(*left, *right, bias, fast_accum)
    y = left.values.float() @ right.values.float().t()
    y = y * (left.inverse_scale[:, None] * right.inverse_scale)
    return (y if bias is None else y + bias.float()).to(dtype)


def power_of_two_scales(bits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the largest power of two that keeps a magnitude within the format, and its inverse.

    Both are normal in fp32, hence 2^126 at most. The scale is 1 for a magnitude of 0 and nan for inf and nan.
    """
    exponent = MAX_EXPONENT[dtype] + 254 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).int()
    exponent = torch.where(bits == 0, 127, exponent.clamp(max=253))
    finite = bits < 0x7F800000
    scale, inverse_scale = (torch.where(finite, power << 23, 0x7FC00000) for power in (exponent, 254 - exponent))
    return scale.int().view(torch.float32), inverse_scale.int().view(torch.float32)


def _abs_bits(magnitude: Tensor) -> Tensor:
    return magnitude.float().view(torch.int32) & 0x7FFFFFFF


@kernel_op
def fp8_amax(x_MD: Tensor, per_row: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """`Amax` of a bf16 matrix."""
    M, D = x_MD.shape
    count = M if per_row else min(MAX_AMAX_BLOCKS, -(-M * D // AMAX_BLOCK_ELEMENTS))
    amax = x_MD.new_empty(count, dtype=torch.int32)
    amax_D = amax.new_empty(D if per_row and columns else 0)
    if has_memory(amax):
        from trainyard.kernels.triton import fp8_cast as kernels

        assert x_MD.dtype == torch.bfloat16
        if per_row:
            kernels.amax_rows(x_MD.contiguous(), amax, amax_D)
        else:
            kernels.amax(x_MD.contiguous(), amax)
    return amax, amax_D


@kernel_op
def fp8_cast(
    x_MD: Tensor, amax: Tensor, amax_D: Tensor, dtype: torch.dtype, per_row: bool, direct: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize a bf16 matrix, direct and transposed; also return the inverse scales of both (with one scale per tensor,
    the first serves both)."""
    M, D = x_MD.shape
    padded_M = -(-M // SIZE_MULTIPLE) * SIZE_MULTIPLE
    out = (
        x_MD.new_empty((padded_M, D) if direct else (0, D), dtype=dtype),
        x_MD.new_empty((D, padded_M) if transposed else (D, 0), dtype=dtype),
        x_MD.new_empty(1 if not per_row else padded_M if direct else 0, dtype=torch.float32),
        x_MD.new_empty(D if per_row and transposed else 0, dtype=torch.float32),
    )
    if has_memory(x_MD):
        from trainyard.kernels.triton import fp8_cast as kernels

        assert x_MD.dtype == torch.bfloat16
        kernels.cast_to_fp8(x_MD.contiguous(), amax, amax_D, *out, padded_M, MAX_EXPONENT[dtype], per_row)
    return out


@kernel_op
def fp8_matmul(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, bias: Tensor | None, fast_accum: bool
) -> Tensor:
    """left @ right^T + bias in bf16, with inverse scales. An operator, so that a compiled model uses the same kernel as
    an eager one."""
    if not has_memory(left):
        return left.new_empty(left.shape[0], right.shape[0], dtype=torch.bfloat16)
    return scaled_mm(left, right.t(), left_scale[:, None], right_scale[None, :], bias, fast_accum)

"""SwiGLU on the output of a fused gate-up projection: silu(gate) * up, both halves of a row read in place."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_COLUMNS = 1024


@triton.jit
def _swiglu_forward(x, out, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    blocks_per_row = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    column = tl.program_id(0) % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    gate = tl.load(x + row * 2 * columns + column, mask, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * columns + columns + column, mask, 0.0).to(tl.float32)
    tl.store(out + row * columns + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask)


@triton.jit
def _swiglu_backward(d_out, x, dx, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    blocks_per_row = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    column = tl.program_id(0) % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    d = tl.load(d_out + row * columns + column, mask, 0.0).to(tl.float32)
    gate = tl.load(x + row * 2 * columns + column, mask, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * columns + columns + column, mask, 0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    d_gate = d * up * s * (1 + gate * (1 - s))
    tl.store(dx + row * 2 * columns + column, d_gate.to(dx.dtype.element_ty), mask)
    tl.store(dx + row * 2 * columns + columns + column, (d * gate * s).to(dx.dtype.element_ty), mask)


@torch.library.custom_op("trainyard::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    """[..., 2 F] to [..., F]."""
    x = x.contiguous()
    columns = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], columns)
    _swiglu_forward[(x.numel() // x.shape[-1] * triton.cdiv(columns, BLOCK_COLUMNS),)](
        x, out, columns, BLOCK=BLOCK_COLUMNS
    )
    return out


@swiglu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@torch.library.custom_op("trainyard::swiglu_backward", mutates_args=())
def swiglu_backward(d_out: Tensor, x: Tensor) -> Tensor:
    d_out, x = d_out.contiguous(), x.contiguous()
    columns = x.shape[-1] // 2
    dx = torch.empty_like(x)
    _swiglu_backward[(x.numel() // x.shape[-1] * triton.cdiv(columns, BLOCK_COLUMNS),)](
        d_out, x, dx, columns, BLOCK=BLOCK_COLUMNS
    )
    return dx


@swiglu_backward.register_fake
def _(d_out: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)

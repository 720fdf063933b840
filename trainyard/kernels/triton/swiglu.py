"""SwiGLU on the output of a fused gate-up projection: silu(gate) * up, both halves of a row read in place."""

from torch import Tensor

from trainyard.compat import has_memory
from trainyard.kernels.custom_op import kernel_op
from trainyard.kernels.triton.language import tl, triton

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


@kernel_op
def swiglu(x: Tensor) -> Tensor:
    """[..., 2 F] to [..., F]."""
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    if has_memory(out):
        _swiglu_forward[_grid(x)](x, out, out.shape[-1], BLOCK=BLOCK_COLUMNS)
    return out


@kernel_op
def swiglu_backward(d_out: Tensor, x: Tensor) -> Tensor:
    d_out, x = d_out.contiguous(), x.contiguous()
    dx = x.new_empty(x.shape)
    if has_memory(dx):
        _swiglu_backward[_grid(x)](d_out, x, dx, d_out.shape[-1], BLOCK=BLOCK_COLUMNS)
    return dx


def _grid(x: Tensor) -> tuple[int]:
    """One program per block of an output row."""
    return (x.numel() // x.shape[-1] * triton.cdiv(x.shape[-1] // 2, BLOCK_COLUMNS),)

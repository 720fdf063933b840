"""GELU, exact (by the error function) or by tanh. The error function is a polynomial times one exponential, within
1.5e-7 everywhere (Abramowitz and Stegun 7.1.26): the libraries' own has branches and takes longer than the memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _erf_parts(x):  # type: ignore[no-untyped-def]
    """erf(x / sqrt 2) and exp(-x^2 / 2)."""
    z = tl.abs(x) * 0.7071067811865476
    t = 1 / (1 + 0.3275911 * z)
    e = tl.exp(-z * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    y = 1 - series * e
    return tl.where(x < 0, -y, y), e


@triton.jit
def _tanh_parts(x):  # type: ignore[no-untyped-def]
    """tanh of GELU's approximation, and the derivative of what it is taken of."""
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    t = 2 * tl.sigmoid(2 * inner) - 1
    return t, 0.7978845608028654 * (1 + 0.134145 * x * x)


@triton.jit
def _gelu_forward(x, out, count, TANH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    v = tl.load(x + at, mask, 0.0).to(tl.float32)
    if TANH:
        e, _ = _tanh_parts(v)
    else:
        e, _ = _erf_parts(v)
    tl.store(out + at, (0.5 * v * (1 + e)).to(out.dtype.element_ty), mask)


@triton.jit
def _gelu_backward(d_out, x, dx, count, TANH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    d = tl.load(d_out + at, mask, 0.0).to(tl.float32)
    v = tl.load(x + at, mask, 0.0).to(tl.float32)
    if TANH:
        t, slope = _tanh_parts(v)
        g = 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * slope
    else:
        e, density = _erf_parts(v)
        g = 0.5 * (1 + e) + 0.3989422804014327 * v * density
    tl.store(dx + at, (d * g).to(dx.dtype.element_ty), mask)


@torch.library.custom_op("trainyard::gelu", mutates_args=())
def gelu(x: Tensor, tanh: bool) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _gelu_forward[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), TANH=tanh, BLOCK=BLOCK, num_warps=8)
    return out


@gelu.register_fake
def _(x: Tensor, tanh: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("trainyard::gelu_backward", mutates_args=())
def gelu_backward(d_out: Tensor, x: Tensor, tanh: bool) -> Tensor:
    d_out, x = d_out.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    _gelu_backward[(triton.cdiv(x.numel(), BLOCK),)](d_out, x, dx, x.numel(), TANH=tanh, BLOCK=BLOCK, num_warps=8)
    return dx


@gelu_backward.register_fake
def _(d_out: Tensor, x: Tensor, tanh: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)

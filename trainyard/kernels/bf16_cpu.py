"""Products and attention in bf16 on CPUs that have no instructions for it, such as older Arm servers and laptops.

torch multiplies there number by number, some hundred times slower than in fp32. Here operands become fp32, a tile at a
time, are multiplied, summed in fp32 and rounded once, as the instructions would. Tiles are small, so that next to
nothing is held besides. What is not bf16 goes to torch's own kernels.
"""

import warnings
from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 18
"""Numbers of an operand at a time."""
MIN_TILE_ROWS = 64
"""Rows of a tile, however long they are."""
FLASH_OP = "_scaled_dot_product_flash_attention_for_cpu"


@cache
def install() -> torch.library.Library:
    """For this process, while what is returned is kept."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that a kernel is there already
        for name, ours in BF16_KERNELS.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, partial(_dispatch, kernel, ours), "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def _dispatch(kernel: Any, ours: Callable[..., Any], keys: Any, *args: Any, **kwargs: Any) -> Any:
    if args[0].dtype == torch.bfloat16:
        return ours(*args, **kwargs)
    return kernel.call_boxed(keys, *args, **kwargs)


def _mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _tiled_matmul(_output(out, (a.shape[0], b.shape[1]), a), a, b)


def _addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None) -> Tensor:
    shape = (a.shape[0], b.shape[1])
    return _tiled_matmul(_output(out, shape, a), a, b, c.expand(shape), beta, alpha)


def _addmm_(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _addmm(c, a, b, beta=beta, alpha=alpha, out=c)


def _bmm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _tiled_bmm(_output(out, (*a.shape[:2], b.shape[2]), a), a, b)


def _baddbmm(
    c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> Tensor:
    shape = (*a.shape[:2], b.shape[2])
    return _tiled_bmm(_output(out, shape, a), a, b, c.expand(shape), beta, alpha)


def _baddbmm_(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _baddbmm(c, a, b, beta=beta, alpha=alpha, out=c)


def _output(out: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if out is None:
        return like.new_empty(shape)
    return out if out.shape == shape else out.resize_(shape)


def _tiled_matmul(
    out: Tensor, a: Tensor, b: Tensor, c: Tensor | None = None, beta: float = 1, alpha: float = 1
) -> Tensor:
    """out = beta * c + alpha * a @ b."""
    size = max(MIN_TILE_ROWS, TILE_ELEMENTS // max(a.shape[1], 1))
    for top in range(0, a.shape[0], size):
        rows = slice(top, top + size)
        left = a[rows].float()
        for first in range(0, b.shape[1], size):
            columns = slice(first, first + size)
            product = left @ b[:, columns].float()
            out[rows, columns] = product if c is None else _scaled_sum(product, c[rows, columns], beta, alpha)
    return out


def _tiled_bmm(out: Tensor, a: Tensor, b: Tensor, c: Tensor | None = None, beta: float = 1, alpha: float = 1) -> Tensor:
    """The same for a batch of matrices: several at a time while they are small, or parts of one."""
    largest = max(prod(x.shape[1:]) for x in (a, b, out))
    if largest > TILE_ELEMENTS:
        for number in range(len(out)):
            _tiled_matmul(out[number], a[number], b[number], None if c is None else c[number], beta, alpha)
        return out
    each = TILE_ELEMENTS // max(largest, 1)
    for first in range(0, len(out), each):
        some = slice(first, first + each)
        product = a[some].float() @ b[some].float()
        out[some] = product if c is None else _scaled_sum(product, c[some], beta, alpha)
    return out


def _scaled_sum(product: Tensor, c: Tensor, beta: float, alpha: float) -> Tensor:
    """With beta 0, c may be anything."""
    return product.mul_(alpha).add_(c, alpha=beta) if beta else product.mul_(alpha)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, **options: Any
) -> tuple[Tensor, Tensor]:
    """A sample at a time; outputs lie in memory as torch's own do."""
    out = torch.empty_like(q)
    lse = _token_major(q[..., 0], torch.float32)
    for number in range(len(q)):
        one = slice(number, number + 1)
        parts = (x[one].float() for x in (q, k, v))
        out[one], lse[one] = _flash(*parts, dropout, causal, **_sample_options(options, one))
    return out, lse


def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout: float,
    causal: bool,
    **options: Any,
) -> tuple[Tensor, ...]:
    made = [_token_major(x, x.dtype) for x in (q, k, v)]
    for number in range(len(q)):
        one = slice(number, number + 1)
        parts = (x[one].float() for x in (dout, q, k, v, out))
        found = _flash_backward(*parts, lse[one], dropout, causal, **_sample_options(options, one))
        for whole, part in zip(made, found, strict=True):
            whole[one] = part
    return tuple(made)


def _token_major(like: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, H, T, ...], in memory [B, T, H, ...]."""
    batch, heads, tokens, *rest = like.shape
    return like.new_empty((batch, tokens, heads, *rest), dtype=dtype).transpose(1, 2)


def _sample_options(options: dict[str, Any], one: slice) -> dict[str, Any]:
    mask = options.get("attn_mask")
    if mask is None:
        return options
    mask = mask[one] if mask.dim() == 4 and mask.shape[0] > 1 else mask
    return options | {"attn_mask": mask.float() if mask.dtype == torch.bfloat16 else mask}


def _flash(*args: Any, **options: Any) -> Any:
    return getattr(torch.ops.aten, FLASH_OP)(*args, **options)


def _flash_backward(*args: Any, **options: Any) -> Any:
    return getattr(torch.ops.aten, f"{FLASH_OP}_backward")(*args, **options)


BF16_KERNELS: dict[str, Callable[..., Any]] = {
    "mm": _mm,
    "mm.out": _mm,
    "addmm": _addmm,
    "addmm.out": _addmm,
    "addmm_": _addmm_,
    "bmm": _bmm,
    "bmm.out": _bmm,
    "baddbmm": _baddbmm,
    "baddbmm.out": _baddbmm,
    "baddbmm_": _baddbmm_,
    FLASH_OP: _attention,
    f"{FLASH_OP}_backward": _attention_backward,
}

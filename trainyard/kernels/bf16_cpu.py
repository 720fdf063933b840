"""bf16 matrix products and attention for Arm CPUs without bf16 instructions: Neoverse N1 (Graviton2) and older.

On these CPUs torch multiplies bf16 one number at a time, some hundred times slower than fp32. The replacements convert
operands to fp32 one tile at a time, multiply, accumulate in fp32 and round once, as the instructions would: 270 times
faster on an N1. Tiles are small, so extra memory is negligible. Other dtypes go to torch's own kernels.

x86 never needs this, because torch has MKL there. `compat.has_fast_bf16_matmul` decides.
"""

import warnings
from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 18
"""Elements of an operand that are converted at a time."""
MIN_TILE_ROWS = 64
"""Fewest rows of a tile, however long they are."""
FLASH_OP = "_scaled_dot_product_flash_attention_for_cpu"


@cache
def install() -> torch.library.Library:
    """Replace torch's kernels in this process, for as long as the returned library lives."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # about overriding an existing kernel
        for name, replacement in BF16_KERNELS.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, partial(_dispatch, kernel, replacement), "CPU", with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def _dispatch(kernel: Any, replacement: Callable[..., Any], keys: Any, *args: Any, **kwargs: Any) -> Any:
    if args[0].dtype == torch.bfloat16:
        return replacement(*args, **kwargs)
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
    tile_rows = max(MIN_TILE_ROWS, TILE_ELEMENTS // max(a.shape[1], 1))
    for row_start in range(0, a.shape[0], tile_rows):
        rows = slice(row_start, row_start + tile_rows)
        left = a[rows].float()
        for start in range(0, b.shape[1], tile_rows):
            columns = slice(start, start + tile_rows)
            product = left @ b[:, columns].float()
            out[rows, columns] = product if c is None else _scaled_sum(product, c[rows, columns], beta, alpha)
    return out


def _tiled_bmm(out: Tensor, a: Tensor, b: Tensor, c: Tensor | None = None, beta: float = 1, alpha: float = 1) -> Tensor:
    """`_tiled_matmul` for a batch: several small matrices at a time, or tiles of one large matrix."""
    largest_matrix = max(prod(x.shape[1:]) for x in (a, b, out))
    if largest_matrix > TILE_ELEMENTS:
        for index in range(len(out)):
            _tiled_matmul(out[index], a[index], b[index], None if c is None else c[index], beta, alpha)
        return out
    batch_step = TILE_ELEMENTS // max(largest_matrix, 1)
    for start in range(0, len(out), batch_step):
        batch = slice(start, start + batch_step)
        product = a[batch].float() @ b[batch].float()
        out[batch] = product if c is None else _scaled_sum(product, c[batch], beta, alpha)
    return out


def _scaled_sum(product: Tensor, c: Tensor, beta: float, alpha: float) -> Tensor:
    """beta * c + alpha * product; with beta 0, c is ignored even if it is nan."""
    return product.mul_(alpha).add_(c, alpha=beta) if beta else product.mul_(alpha)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, **options: Any
) -> tuple[Tensor, Tensor]:
    """Flash attention one sample at a time; outputs have the strides of torch's own kernel."""
    out = torch.empty_like(q)
    lse = _token_major(q[..., 0], torch.float32)
    for index in range(len(q)):
        sample = slice(index, index + 1)
        inputs = (x[sample].float() for x in (q, k, v))
        out[sample], lse[sample] = _flash(*inputs, dropout, causal, **_sample_options(options, sample))
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
    grads = [_token_major(x, x.dtype) for x in (q, k, v)]
    for index in range(len(q)):
        sample = slice(index, index + 1)
        inputs = (x[sample].float() for x in (dout, q, k, v, out))
        sample_grads = _flash_backward(*inputs, lse[sample], dropout, causal, **_sample_options(options, sample))
        for grad, sample_grad in zip(grads, sample_grads, strict=True):
            grad[sample] = sample_grad
    return tuple(grads)


def _token_major(like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty [B, H, T, ...] tensor whose memory is laid out as [B, T, H, ...]."""
    batch, heads, tokens, *rest = like.shape
    return like.new_empty((batch, tokens, heads, *rest), dtype=dtype).transpose(1, 2)


def _sample_options(options: dict[str, Any], sample: slice) -> dict[str, Any]:
    mask = options.get("attn_mask")
    if mask is None:
        return options
    mask = mask[sample] if mask.dim() == 4 and mask.shape[0] > 1 else mask
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

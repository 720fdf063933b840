"""bf16 matrix multiplications and attention for Arm CPUs without bf16 instructions: Neoverse N1 (Graviton2) and older.

On these CPUs torch multiplies bf16 one number at a time, some hundred times slower than fp32. The replacements convert
operands to fp32 one tile at a time, multiply, accumulate in fp32 and round once, as the instructions would: 270 times
faster on an N1. Tiles are small, so extra memory is negligible. Other dtypes go to torch's own kernels.

x86 never needs this, because torch has MKL there. `compat.has_fast_bf16_matmul` decides.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 18
"""Elements of an operand that are converted at a time, and of a product."""
MIN_TILE_ROWS = 64
"""Fewest rows of a tile, however long they are."""
FLASH_OP = "_scaled_dot_product_flash_attention_for_cpu"
_flash, _flash_backward = getattr(torch.ops.aten, FLASH_OP), getattr(torch.ops.aten, f"{FLASH_OP}_backward")


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
    return _addmm(a.new_empty(()), a, b, beta=0, out=out)


def _addmm_(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _addmm(c, a, b, beta=beta, alpha=alpha, out=c)


def _addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None) -> Tensor:
    """beta * c + alpha * a @ b, for matrices or for batches of them. With beta 0, c is ignored even if it is nan."""
    shape = (*a.shape[:-1], b.shape[-1])
    if out is None:
        out = a.new_empty(shape)
    elif out.shape != shape:
        out.resize_(shape)
    c = c.expand(shape)
    for tile, left, right in _tiles(a, b, prod(shape[1:])):
        product = left @ right.float()
        product = product if alpha == 1 else product.mul_(alpha)
        out[tile] = product.add_(c[tile], alpha=beta) if beta else product
    return out


def _tiles(a: Tensor, b: Tensor, product_elements: int) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Each tile of the product and its operands, the left one in fp32: tiles of a matrix, or several small matrices."""
    if a.dim() == 2:
        rows = max(MIN_TILE_ROWS, TILE_ELEMENTS // max(a.shape[1], isqrt(TILE_ELEMENTS)))
        for row in range(0, a.shape[0], rows):
            left = a[row : row + rows].float()
            for column in range(0, b.shape[1], rows):
                columns = slice(column, column + rows)
                yield (slice(row, row + rows), columns), left, b[:, columns]
        return
    largest_matrix = max(prod(a.shape[1:]), prod(b.shape[1:]), product_elements, 1)
    if largest_matrix <= TILE_ELEMENTS:
        step = TILE_ELEMENTS // largest_matrix
        for batch in (slice(start, start + step) for start in range(0, len(a), step)):
            yield batch, a[batch].float(), b[batch]
        return
    for index in range(len(a)):
        for tile, left, right in _tiles(a[index], b[index], 0):
            yield (index, *tile), left, right


def _attention(q: Tensor, k: Tensor, v: Tensor, *dropout_causal: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Flash attention one sample at a time; outputs have the strides of torch's own kernel."""
    out = torch.empty_like(q)
    lse = _token_major(q[..., 0], torch.float32)
    for index in range(len(q)):
        sample = slice(index, index + 1)
        inputs = (x[sample].float() for x in (q, k, v))
        out[sample], lse[sample] = _flash(*inputs, *dropout_causal, **_sample_options(options, sample))
    return out, lse


def _attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *dropout_causal: Any, **options: Any
) -> tuple[Tensor, ...]:
    grads = [_token_major(x, x.dtype) for x in (q, k, v)]
    for index in range(len(q)):
        sample = slice(index, index + 1)
        inputs = (x[sample].float() for x in (dout, q, k, v, out))
        sample_grads = _flash_backward(*inputs, lse[sample], *dropout_causal, **_sample_options(options, sample))
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


BF16_KERNELS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mm", "mm.out", "bmm", "bmm.out"), _mm),
    **dict.fromkeys(("addmm", "addmm.out", "baddbmm", "baddbmm.out"), _addmm),
    **dict.fromkeys(("addmm_", "baddbmm_"), _addmm_),
    FLASH_OP: _attention,
    f"{FLASH_OP}_backward": _attention_backward,
}

"""Log-softmax of rows, each of which one program sums in the same order."""

import torch
from torch import Tensor

from trainyard.kernels.triton.language import tl, triton

BLOCK_VOCAB = 4096


@triton.jit
def _log_softmax_row(logits, out, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    column = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        x = tl.load(logits + start + column, start + column < columns, float("-inf"))
        new_top = tl.maximum(top, x)
        total = total * tl.exp(top - new_top) + tl.exp(x - new_top)
        top = new_top
    row_top = tl.max(top, 0)
    lse = row_top + tl.log(tl.sum(total * tl.exp(top - row_top), 0))
    for start in range(0, columns, BLOCK):
        mask = start + column < columns
        x = tl.load(logits + start + column, mask, 0.0)
        tl.store(out + row * columns + start + column, x - lse, mask)


def log_softmax(logits: Tensor) -> Tensor:
    """Of fp32 [M, V]."""
    assert logits.dtype == torch.float32
    logits = logits.contiguous()  # how threads share a row may depend on the distance between rows
    out = torch.empty_like(logits)
    _log_softmax_row[(len(logits),)](logits, out, logits.shape[1], BLOCK=BLOCK_VOCAB, num_warps=8)
    return out

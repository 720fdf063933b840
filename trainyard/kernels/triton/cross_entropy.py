"""Cross entropy on a chunk of logits: the loss of each row, and the logits overwritten with its gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_VOCAB = 4096


@triton.jit
def _cross_entropy_row(logits, labels, losses, columns, stride, IGNORED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    at = tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    counts = label != IGNORED
    picked = tl.load(logits + tl.where(counts, label, 0)).to(tl.float32)  # long before it is overwritten
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        x = tl.load(logits + start + at, start + at < columns, float("-inf")).to(tl.float32)
        higher = tl.maximum(most, x)
        # A lane that has met no logit yet has nothing to scale.
        total = total * tl.where(most == higher, 1.0, tl.exp(most - higher)) + tl.where(
            x == float("-inf"), 0.0, tl.exp(x - higher)
        )
        most = higher
    top = tl.max(most, 0)
    sum_ = tl.sum(total * tl.exp(most - top), 0)
    tl.store(losses + row, tl.where(counts, tl.log(sum_) + top - picked, 0.0))
    share = tl.where(counts, 1 / sum_, 0.0)
    for start in range(0, columns, BLOCK):
        mask = start + at < columns
        x = tl.load(logits + start + at, mask, float("-inf")).to(tl.float32)
        # Rounded first, as the twin does: where the softmax is 1 the gradient is exactly 0.
        y = (tl.exp(x - top) * share).to(logits.dtype.element_ty).to(tl.float32)
        y -= tl.where(counts & (start + at == label), 1.0, 0.0)
        tl.store(logits + start + at, y.to(logits.dtype.element_ty), mask)


def cross_entropy_(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Loss of each row, fp32; `logits` [rows, words] become the gradient of their sum."""
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    _cross_entropy_row[(len(logits),)](
        logits, labels, losses, logits.shape[1], logits.stride(0), IGNORED=ignore_index, BLOCK=BLOCK_VOCAB, num_warps=8
    )
    return losses

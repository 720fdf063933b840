"""Cross entropy of a chunk of logits: the loss of each row, and the gradient in the place of the logits."""

import torch
from torch import Tensor

from trainyard.compat import has_memory
from trainyard.kernels.triton.language import tl, triton

BLOCK_VOCAB = 4096


@triton.jit
def _cross_entropy_row(  # type: ignore[no-untyped-def]
    logits, labels, weights, losses, columns, stride,
    WRITES_GRADIENT: tl.constexpr, IGNORE_INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    column = tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    valid = label != IGNORE_INDEX
    label_logit = tl.load(logits + tl.where(valid, label, 0)).to(tl.float32)  # read before the loop below overwrites it
    running_max = tl.full((BLOCK,), float("-inf"), tl.float32)
    running_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        x = tl.load(logits + start + column, start + column < columns, float("-inf")).to(tl.float32)
        new_max = tl.maximum(running_max, x)
        # A lane that has seen no logit yet has nothing to rescale.
        running_sum = running_sum * tl.where(running_max == new_max, 1.0, tl.exp(running_max - new_max)) + tl.where(
            x == float("-inf"), 0.0, tl.exp(x - new_max)
        )
        running_max = new_max
    max_ = tl.max(running_max, 0)
    sum_ = tl.sum(running_sum * tl.exp(running_max - max_), 0)
    tl.store(losses + row, tl.where(valid, tl.log(sum_) + max_ - label_logit, 0.0))
    if WRITES_GRADIENT:
        inverse_sum = tl.where(valid, 1 / sum_, 0.0)
        weight = 1.0 if weights is None else tl.load(weights + row)
        for start in range(0, columns, BLOCK):
            mask = start + column < columns
            x = tl.load(logits + start + column, mask, float("-inf")).to(tl.float32)
            # Round first, as the reference does: where the softmax is 1 the gradient is exactly 0.
            y = (tl.exp(x - max_) * inverse_sum).to(logits.dtype.element_ty).to(tl.float32)
            y -= tl.where(valid & (start + column == label), 1.0, 0.0)
            tl.store(logits + start + column, (y * weight).to(logits.dtype.element_ty), mask)


def cross_entropy_(
    logits: Tensor, labels: Tensor, ignore_index: int, weights: Tensor | None = None, writes_gradient: bool = True
) -> Tensor:
    """Return the fp32 loss of each row; `logits` [rows, vocab] become the gradient of their sum, in which the losses
    count by their `weights` (fp32) if given."""
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    if has_memory(losses):
        _cross_entropy_row[(len(logits),)](
            logits, labels, weights, losses, logits.shape[1], logits.stride(0),
            WRITES_GRADIENT=writes_gradient, IGNORE_INDEX=ignore_index, BLOCK=BLOCK_VOCAB, num_warps=8,
        )  # fmt: skip
    return losses

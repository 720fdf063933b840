"""The most likely token of each row of logits: one program per row, because a row fits the registers of one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.triton.decode.dependent_launch import launch_options, start, wait


@triton.jit
def _greedy_tokens_kernel(logits, out, vocab, row_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    start(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = lane
    for first in range(0, vocab, BLOCK):
        value = tl.load(logits + row * row_stride + first + lane, first + lane < vocab, float("-inf")).to(tl.float32)
        index = tl.where(value > best, first + lane, index)
        best = tl.maximum(best, value)
    top = tl.max(best, 0)
    tl.store(out + row, tl.min(tl.where(best == top, index, vocab - 1), 0))


def greedy_tokens(logits: Tensor) -> Tensor:
    """The first index of the largest logit of each row of [M, V], int64, as `Kernels.greedy_tokens`."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    assert logits.stride(-1) == 1
    block = min(triton.next_power_of_2(logits.shape[1]), 16384)
    _greedy_tokens_kernel[(len(logits),)](
        logits, out, logits.shape[1], logits.stride(0), BLOCK=block, num_warps=16, **launch_options()
    )
    return out

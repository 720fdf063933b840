"""Cosines and sines of RoPE for few positions: one kernel instead of three."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.triton.decode.dependent_launch import launch_options, start, wait


@triton.jit
def _rope_angles_kernel(  # type: ignore[no-untyped-def]
    position, frequency, cos, sin, factor, K: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr
):
    start(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK_K)
    in_row = column < K
    cycles = tl.load(frequency + column, in_row, 0.0)
    wait(PDL)
    angle = tl.load(position + row).to(tl.float32) * cycles
    tl.store(cos + row * K + column, tl.cos(angle) * factor, in_row)
    tl.store(sin + row * K + column, tl.sin(angle) * factor, in_row)


def rope_angles(position: Tensor, frequency: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """As `Kernels.rope_angles`, for integer positions."""
    K = len(frequency)
    cos, sin = (torch.empty(*position.shape, K, dtype=torch.float32, device=position.device) for _ in range(2))
    _rope_angles_kernel[(position.numel(),)](
        position.contiguous(), frequency, cos, sin, factor, K=K, BLOCK_K=triton.next_power_of_2(K), num_warps=1,
        **launch_options(),
    )  # fmt: skip
    return cos, sin

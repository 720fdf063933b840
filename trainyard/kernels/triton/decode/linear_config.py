"""How the products of decode steps are divided into programs."""

from typing import NamedTuple

import torch
import triton


class LinearConfig(NamedTuple):
    """Tile shape and launch options."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    split_k: int = 1

    def fit(self, K: int, dtype: torch.dtype) -> "LinearConfig":
        """The same for few columns, and for elements wider than bf16."""
        block_k = max(min(self.block_k * 2 // dtype.itemsize, triton.next_power_of_2(K)), 16)
        return self._replace(block_k=block_k)


def linear_config(M: int, rows: int, K: int, dtype: torch.dtype, fp8: bool = False) -> LinearConfig:
    """The fastest configuration for W [rows, K] by measurements on an H200: of captured steps of a 1.3B model with M 8,
    16 and 32, and of its products with M 1. Tiles of 48 and 84 rows give each of its 132 multiprocessors one program;
    more rows of x leave less shared memory. W in fp8 needs more elements under way for the same number of bytes."""
    if M == 1 and fp8:
        if rows < 4096:
            return LinearConfig(2, 2048, 4) if K <= 2048 else LinearConfig(4, 2048, 2)
        return LinearConfig(8, 512, 2) if rows < 8192 else LinearConfig(8, 2048, 4)
    if M == 1:
        if rows < 4096:
            return LinearConfig(2, 2048, 1) if K <= 2048 else LinearConfig(4, 2048, 4)
        return LinearConfig(4, 1024, 1) if rows < 16384 else LinearConfig(4, 2048, 8)
    if dtype.itemsize > 2:  # without tensor cores, larger tiles take minutes to compile: for tests, not for speed
        return LinearConfig(32, 32, 4, 2)
    many = M > 32
    if rows < 4096:
        if K <= 2048 and (fp8 or not many):
            return LinearConfig(64, 512, 4, 2, 4)
        return LinearConfig(64, 256, 4, 4 if fp8 else 3, 4)
    if rows < 8192:
        return LinearConfig(48, 256, 4, (4 if many else 6) if fp8 else 3 if many else 4)
    if fp8:
        return LinearConfig(84, 256, 4, 3 if many else 4)
    return LinearConfig(84, 128, 4, 4) if rows < 16384 else LinearConfig(64, 64, 4, 4)

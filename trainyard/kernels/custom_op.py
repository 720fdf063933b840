"""Custom operators around Triton kernels, and how to launch kernels that work on rows."""

from collections.abc import Callable
from typing import Any

import torch

WORKSPACE_BYTES: dict[Any, Callable[..., int]] = {}
"""Bytes that an operator allocates besides its results, where its rule for tensors without memory does not show them:
a function of the operator's arguments. The module that defines the operator adds it."""
PARTIAL_SUM_OPS: set[Any] = set()
"""Operators whose last result are the partial sums of vector gradients, one for each program of the kernel."""


def kernel_op(body: Callable[..., Any]) -> Any:
    """Make `body` the operator `trainyard::NAME`, and also its rule for tensors without memory.

    `body` allocates the outputs and launches kernels only if they have memory (`compat.has_memory`). Whatever a launch
    needs is computed inside that branch, because the sizes of a traced graph may be symbols.
    """
    op = torch.library.custom_op(f"trainyard::{body.__name__}", body, mutates_args=())
    op.register_fake(body)
    return op


def row_block(columns: int, elements_per_warp: int) -> dict[str, int]:
    """Launch options of a kernel that holds a whole row in one block."""
    block = 1 << (columns - 1).bit_length()
    return {"BLOCK": block, "num_warps": min(max(block // elements_per_warp, 1), 16)}

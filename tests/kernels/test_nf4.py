"""nf4 against bitsandbytes: what version 0.50 computed with its definition in torch, and the installed version itself.
Shards against the full matrix; the kernel against plain torch, in Triton's interpreter on a CPU and compiled on a GPU."""

import hashlib
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from tests.support.pairwise import pairwise
from trainyard.core.errors import UserError
from trainyard.kernels import nf4
from trainyard.kernels.nf4 import Nf4Matrix, concatenate_nf4, dequantize_nf4, nf4_part, quantize_nf4

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")


def example(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Weights without a random number generator; magnitudes differ by blocks, and one block is zero."""
    index = torch.arange(rows * columns)
    values = ((index * index * 7919 + index * 104729) % 20011 - 10005) * (1 + index // 64 * 37 % 101)
    return (values * (index // 64 != 5)).float().div(2**25).view(rows, columns).to(dtype)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def assert_same(actual: Nf4Matrix, expected: Nf4Matrix) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


RECORDED: dict[str, tuple[str, list[str]]] = {}
"""From bitsandbytes 0.50.0 without its compiled library: the mean, then digests of codes, absmax codes, scales and
dequantized values of `example(100, 192)`, whose last group of absmax values is incomplete."""

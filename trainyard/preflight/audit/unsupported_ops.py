"""Operators and dtypes that Trainium does not support: the only table of them.

From reports of users of torch-neuronx 2.11 and 2.12: no sort, no complex numbers, no FFT; 64-bit floats are silently
cast to 32 bits; look-ups by int64 run at a few hundredths of the speed of int32.
"""

from typing import NamedTuple

import torch


class UnsupportedOp(NamedTuple):
    reason: str
    fix: str


_SORTING = UnsupportedOp(
    "sorting is not supported", "compare instead (amax, argmax, a mask by threshold), or sort on the host"
)
_FOURIER = UnsupportedOp(
    "Fourier transforms are not supported", "multiply by a constant matrix, or transform on the host"
)
UNSUPPORTED_OPS = {
    **dict.fromkeys(("sort", "argsort", "msort", "topk", "kthvalue", "median", "nanmedian", "mode"), _SORTING),
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), _FOURIER),
}
"""By `op_base_name`."""

_COMPLEX = UnsupportedOp("complex numbers are not supported", "two tensors for real and imaginary part")
UNSUPPORTED_DTYPES = {
    torch.float64: UnsupportedOp("64-bit floats are cast to 32 bits", "float32"),
    torch.complex32: _COMPLEX,
    torch.complex64: _COMPLEX,
    torch.complex128: _COMPLEX,
}
"""By dtype of an operator's result."""
UNSUPPORTED_FP8_DTYPES = {
    "trn2": {torch.float8_e4m3fn: UnsupportedOp("trn2 defines this 8-bit format differently", "float8_e5m2, or bf16")}
}
"""By generation, then by dtype."""

_INDEX_SECOND = (
    *("embedding", "embedding_dense_backward", "nll_loss_forward", "take", "put"),
    *("index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put"),
)
_INDEX_THIRD = (
    *("index_select", "index_add", "index_copy", "index_fill", "index_reduce"),
    *("gather", "scatter", "scatter_add", "scatter_reduce", "nll_loss_backward"),
)
INDEX_ARGUMENTS = {**dict.fromkeys(_INDEX_SECOND, 1), **dict.fromkeys(_INDEX_THIRD, 2)}
"""Position of the argument that is an index."""
_INDEX_FIX = "int32 (torch accepts it here: drop .long(); for the index of a maximum, compare with the maximum instead)"
_CROSS_ENTROPY_FIX = (
    "-logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]) with int32 labels: torch's cross_entropy takes "
    "no int32; then mask ignored labels"
)


def op_base_name(name: str) -> str:
    """index_add for aten.index_add_.default and aten.index_add."""
    return name.split(".")[1].removesuffix("_")


def index_fix(name: str) -> str:
    """How to look up by int32, by `op_base_name`."""
    return _CROSS_ENTROPY_FIX if name.startswith("nll_loss") else _INDEX_FIX

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

INDEX_ARGUMENTS = {
    "embedding": (1,),
    "embedding_dense_backward": (1,),
    "index": (1,),
    "_unsafe_index": (1,),
    "index_put": (1,),
    "_index_put_impl": (1,),
    "_unsafe_index_put": (1,),
    "take": (1,),
    "put": (1,),
    "index_select": (2,),
    "index_add": (2,),
    "index_copy": (2,),
    "index_fill": (2,),
    "index_reduce": (2,),
    "gather": (2,),
    "scatter": (2,),
    "scatter_add": (2,),
    "scatter_reduce": (2,),
    "nll_loss_forward": (1,),
    "nll_loss_backward": (2,),
}
"""Positions of the arguments that are indices."""
INDEX_FIX = "int32 (torch accepts it here: drop .long(); for the index of a maximum, compare with the maximum instead)"


def op_base_name(name: str) -> str:
    """index_add for aten.index_add_.default and aten.index_add."""
    return name.split(".")[1].removesuffix("_")

"""What Trainium does not do, operator by operator and dtype by dtype. The one table of it.

From what users of torch-neuronx 2.11 and 2.12 report: no sort, no complex numbers, no FFT; 64-bit floats are cast to 32
bits without a word; look-ups by int64 run, at a few hundredths of the speed of int32.
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
    "Fourier transforms are not supported", "a product with a constant matrix, or transform on the host"
)
UNSUPPORTED_OPS = dict.fromkeys(
    ("sort", "argsort", "msort", "topk", "kthvalue", "median", "nanmedian", "mode"), _SORTING
) | (dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), _FOURIER))
"""By an operator's name without its variant."""

_COMPLEX = UnsupportedOp("complex numbers are not supported", "real and imaginary part as two tensors")
UNSUPPORTED_DTYPES = {
    torch.float64: UnsupportedOp("64-bit floats are cast to 32 bits", "float32"),
    torch.complex32: _COMPLEX,
    torch.complex64: _COMPLEX,
    torch.complex128: _COMPLEX,
}
"""By dtype of what an operator makes."""
UNSUPPORTED_FP8_DTYPES = {
    "trn2": {
        torch.float8_e4m3fn: UnsupportedOp("trn2 knows this format of 8 bits by another rule", "float8_e5m2, or bf16")
    }
}
"""The same by generation."""

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
"""Which arguments of an operator are indices."""
INDEX_FIX = "int32 (torch takes it here: leave out .long(); a maximum's place: compare with the maximum instead)"


def op_base_name(name: str) -> str:
    """aten.index_add_.default and aten.index_add to index_add."""
    return name.split(".")[1].removesuffix("_")

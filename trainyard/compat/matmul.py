"""Matrix multiplications behind private names or with version-dependent arguments."""

import torch
import torch.nn.functional as F
from torch import Tensor


def has_fast_bf16_matmul() -> bool:
    """True if torch multiplies bf16 quickly on this CPU: with bf16 instructions or with MKL (torch 2.11 to 2.14)."""
    mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) or mkl


def add_matmul_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may be fp32 and a and b bf16.

    On GPUs the matmul accumulates into `total` in its epilogue, so it is never rounded or written (`out_dtype` of
    addmm, torch 2.11 to 2.14).
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def mm_to_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 matrices in fp32, on GPUs from the sums of the tensor cores (`out_dtype` of mm, torch 2.11 to
    2.14)."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def bmm_to_fp32(a: Tensor, b: Tensor) -> Tensor:
    """The fp32 product of batches of matrices, which may be bf16. On GPUs it is never rounded (`out_dtype` of bmm,
    torch 2.11 to 2.14)."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b).float()


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, fast_accum: bool) -> Tensor:
    """a @ b of fp8 matrices times their inverse scales, plus bias, in bf16 (torch 2.11 to 2.14).

    `a` is row-major and `b` column-major, with sizes that are multiples of 16. Scales are fp32, both [1, 1] or [M, 1]
    and [1, N]. At most one operand is e5m2. `fast_accum` is less exact: sums stay in the tensor cores' 22 bits.
    """
    return torch._scaled_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast_accum
    )


def has_grouped_mm(a: Tensor, b: Tensor) -> bool:
    """True if torch has a kernel for a grouped GEMM of these tensors (torch.nn.functional.grouped_mm)."""
    aligned = all(x.shape[-1] % 8 == 0 and x.shape[-2] % 8 == 0 for x in (a[:8], b))
    return a.is_cuda and a.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """[N, D] x [E, D, O] to [N, O], or [O, N] x [N, D] to [E, O, D]: groups of the dim N end at `ends`, int32."""
    out: Tensor = F.grouped_mm(a, b, offs=ends)
    return out

"""Triton kernel that dequantizes nf4: one pass reads half a byte per weight and writes the matrix for a matmul."""

from torch import Tensor

from trainyard.kernels.triton.language import tl, triton

BLOCKS_PER_PROGRAM = 64
"""Blocks of 64 weights: 32 weights per thread."""


def dequantize(
    codes: Tensor, absmax_codes: Tensor, row_starts: Tensor, scales: Tensor, offsets: Tensor, tables: Tensor,
    out_RC: Tensor,
) -> None:  # fmt: skip
    """Fill `out_RC` with the values of an `Nf4Matrix`."""
    blocks = absmax_codes.numel()
    # Without fused multiply-add, scale and offset round as they do in torch.
    _dequantize_kernel[(triton.cdiv(blocks, BLOCKS_PER_PROGRAM),)](
        codes, absmax_codes, row_starts, scales, offsets, tables, out_RC, blocks, absmax_codes.shape[1],
        BLOCKS=BLOCKS_PER_PROGRAM, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    codes, absmax_codes, row_starts, scales, offsets, tables, out, blocks, blocks_per_row, BLOCKS: tl.constexpr
):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    mask = block < blocks
    row_start = tl.load(row_starts + block // blocks_per_row, mask, 0)
    group = (row_start + block % blocks_per_row) // 256
    absmax_code = tl.load(absmax_codes + block, mask, 0).to(tl.int32)
    # `tables` are the 16 values of nf4, then the dynamic map.
    absmax = tl.load(tables + 16 + absmax_code) * tl.load(scales + group, mask, 0.0)
    absmax = absmax + tl.load(offsets + group, mask, 0.0)

    index = block.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    pairs = tl.load(codes + index, mask[:, None], 0).to(tl.int32)
    first = tl.load(tables + (pairs >> 4)) * absmax[:, None]
    second = tl.load(tables + (pairs & 15)) * absmax[:, None]
    index = block.to(tl.int64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out + index, tl.interleave(first, second).to(out.dtype.element_ty), mask[:, None])

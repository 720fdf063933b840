"""Matrices in nf4 with double quantization, the storage of QLoRA's frozen weights: 4.13 bits per weight.

Blocks of 64 weights along a row share an absmax, their largest magnitude; a weight is one of the 16 values of `NF4`
times it. The absmax values minus their mean are quantized again: 256 of them, in row-major order over the full matrix,
share a scale, and each is one of the 256 values of a dynamic map times it. Values are those of bitsandbytes 0.50
(`quantize_4bit(..., quant_type="nf4", compress_statistics=True)`), with these differences:

- Columns are a multiple of 64, so that a block never spans two rows, and a shard has whole blocks.
- The mean is computed in fp64 and rounded once. bitsandbytes computes it in fp32, with a result that depends on the
  device and the number of threads. The two are equal if the fp32 sum is exact, as for bf16 matrices of up to a few
  thousand blocks; otherwise they differ in the last bits, far below what 4 bits resolve.
- Each row knows where its absmax values are in the full matrix, and the scales of the full matrix stay together. Any
  rows and any columns (by 64) of a matrix are therefore a matrix with the same values, and so are several matrices
  with the same columns below each other, as q, k and v.

Shapes: R rows, C columns, B = C / 64 blocks per row, S groups of 256 absmax values.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.core.errors import UserError

BLOCK, GROUP = 64, 256
"""Weights that share an absmax, and absmax values that share a scale."""
CHUNK_ELEMENTS = 1 << 22
"""Weights that the plain torch version dequantizes at a time: it needs 12 bytes for each."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution, scaled to [-1, 1] (QLoRA, appendix E)."""


class Nf4Matrix(NamedTuple):
    """A matrix [R, C] in nf4. None of its tensors needs a gradient."""

    codes: Tensor
    """uint8 [R, C / 2]: two indices into `NF4` per byte, the first one in the high bits."""
    absmax_codes: Tensor
    """uint8 [R, B]: indices into the dynamic map."""
    row_starts: Tensor
    """int32 [R]: index of each row's first absmax, which determines its group, in the row-major full matrix."""
    scales: Tensor
    """fp32 [S]: scale of each group."""
    offsets: Tensor
    """fp32 [S]: mean absmax of the full matrix that a group is from."""
    tables: Tensor
    """fp32 [16 + 256]: `NF4` and the dynamic map. Part of the matrix, so that it is where the matrix is."""


def dynamic_map() -> Tensor:
    """The signed 8-bit numbers of "8-Bit Approximations for Parallelism in Deep Learning": seven decades, with twice as
    many fractions in each as in the one below."""
    decades = [10 ** (i - 6) * _centers(torch.linspace(0.1, 1, 2**i + 1)) for i in range(7)]
    positive = torch.cat(decades)
    return torch.cat((positive, -positive, torch.tensor([0.0, 1.0]))).sort().values


def block_absmax(weight_RC: Tensor) -> Tensor:
    """Largest magnitude of each block, fp32 [R, B]."""
    R, C = weight_RC.shape
    if C % BLOCK:
        raise UserError(f"this rank's {R} x {C} matrix: nf4 needs columns that are a multiple of {BLOCK}")
    # The magnitudes of bf16 are exact in bf16: no copy of the matrix in fp32.
    return weight_RC.reshape(R, -1, BLOCK).abs().amax(2).float()


def quantize_nf4(weight_RC: Tensor, absmax: Tensor | None = None, row: int = 0, column: int = 0) -> Nf4Matrix:
    """Quantize a matrix, or a shard of one: then `absmax` is `block_absmax` of the full matrix, whose element
    (row, column) is the shard's first."""
    R, B = (own_absmax := block_absmax(weight_RC)).shape
    assert column % BLOCK == 0
    absmax = own_absmax if absmax is None else absmax
    offset = _mean(absmax)
    absmax_codes, scales = _quantize_groups((absmax - offset).flatten())
    first = column // BLOCK
    absmax_codes = absmax_codes.view_as(absmax)[row : row + R, first : first + B]
    values = weight_RC.reshape(R, B, BLOCK).float() * own_absmax.clamp(min=1e-38).reciprocal()[:, :, None]
    tables = torch.cat((torch.tensor(NF4), dynamic_map())).to(weight_RC.device)
    codes = _nearest(values.clamp_(-1, 1), tables[: len(NF4)]).view(R, -1, 2)
    row_starts = torch.arange(row, row + R, device=absmax.device) * absmax.shape[1] + first
    return Nf4Matrix(
        codes[:, :, 0] << 4 | codes[:, :, 1], absmax_codes.contiguous(), row_starts.int(), scales,
        offset.expand_as(scales).contiguous(), tables,
    )  # fmt: skip


def dequantize_nf4(matrix: Nf4Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix [R, C]. The kernel in triton/nf4.py returns the same bits."""
    R, B = matrix.absmax_codes.shape
    nf4, dynamic = torch.split(matrix.tables, [len(NF4), 256])
    block = torch.arange(B, device=matrix.codes.device)
    out = torch.empty(R, B, BLOCK, dtype=dtype, device=matrix.codes.device)
    rows = max(1, CHUNK_ELEMENTS // (B * BLOCK))
    for start in range(0, R, rows):
        chunk = slice(start, start + rows)
        group = (matrix.row_starts[chunk, None] + block) // GROUP
        absmax = dynamic[matrix.absmax_codes[chunk].int()] * matrix.scales[group] + matrix.offsets[group]
        codes = matrix.codes[chunk].view(-1, B, BLOCK // 2)
        codes = torch.stack((codes >> 4, codes & 15), -1).flatten(2)
        out[chunk] = nf4[codes.int()] * absmax[:, :, None]
    return out.view(R, -1)


def nf4_part(matrix: Nf4Matrix, rows: slice, columns: slice = slice(None)) -> Nf4Matrix:
    """Some rows and columns, for a shard; columns by multiples of 64."""
    first, end, _ = columns.indices(2 * matrix.codes.shape[1])
    assert first % BLOCK == end % BLOCK == 0
    return matrix._replace(
        codes=matrix.codes[rows, first // 2 : end // 2].contiguous(),
        absmax_codes=matrix.absmax_codes[rows, first // BLOCK : end // BLOCK].contiguous(),
        row_starts=matrix.row_starts[rows] + first // BLOCK,
    )


def concatenate_nf4(matrices: list[Nf4Matrix]) -> Nf4Matrix:
    """Matrices with the same columns below each other, each with its own mean, as if they were stored apart."""
    groups = 0
    row_starts = []
    for matrix in matrices:
        row_starts.append(matrix.row_starts + groups * GROUP)
        groups += len(matrix.scales)
    codes, absmax_codes, _, scales, offsets, _ = (torch.cat(tensors) for tensors in zip(*matrices, strict=True))
    return Nf4Matrix(codes, absmax_codes, torch.cat(row_starts), scales, offsets, matrices[0].tables)


def _mean(absmax: Tensor) -> Tensor:
    return absmax.double().mean().float()


def _quantize_groups(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of the dynamic map for each value, and the scale of each group."""
    groups = F.pad(values, (0, -len(values) % GROUP)).view(-1, GROUP)
    scales = groups.abs().amax(1)
    divisors = scales.clamp(min=1e-38)[:, None]
    scaled = groups * divisors.reciprocal()
    if len(values) % GROUP:
        scaled[-1] = groups[-1] / divisors[-1]  # bitsandbytes divides in a last, incomplete group
    return _nearest(scaled.clamp_(-1, 1), dynamic_map().to(values.device)).view(-1)[: len(values)], scales


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    """Index of the nearest number of a sorted table, uint8; of two, the lower one."""
    return torch.bucketize(values, _centers(table), out_int32=True).to(torch.uint8)


def _centers(boundaries: Tensor) -> Tensor:
    return (boundaries[:-1] + boundaries[1:]) / 2

"""nf4 against bitsandbytes: what version 0.50 computed with its definition in torch, and the installed version itself.
Shards against the full matrix. The kernel against plain torch, in Triton's interpreter on a CPU, compiled on a GPU."""

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


RECORDED = {
    "bf16": (
        "0x1.e6a7e40000000p-7", ["53ee411b0d37302f", "b69b56a8093fe12f", "1bd91383ae4f13bc", "0dfe57084f9e1676"],
    ),
    "fp32": (
        "0x1.e697c60000000p-7", ["23f355bb75e5c8c9", "ed6309ff882306ae", "10bf318c92ddd179", "e31f407d8b5bb5f7"],
    ),
}  # fmt: skip
"""From bitsandbytes 0.50.0 without its compiled library: the mean, then digests of codes, absmax codes, scales and
dequantized values of `example(100, 192)`, whose last group of absmax values is incomplete."""


@pairwise(dtype=["bf16", "fp32"])
def test_recorded_values_of_bitsandbytes(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, (mean, digests) = example(100, 192, DTYPES[dtype]), RECORDED[dtype]
    matrix = quantize_nf4(weight)
    assert float(matrix.offsets[0]) == pytest.approx(float.fromhex(mean), rel=2**-23)
    if dtype == "fp32":  # of bf16 weights the sum is exact in fp32, and the mean the same
        assert float(matrix.offsets[0]).hex() != mean
        monkeypatch.setattr(nf4, "_mean", lambda _: torch.tensor(float.fromhex(mean)))
        matrix = quantize_nf4(weight)
    values = dequantize_nf4(matrix, DTYPES[dtype])
    assert [digest(x) for x in (matrix.codes, matrix.absmax_codes, matrix.scales, values)] == digests


@pytest.mark.nightly
@pairwise(dtype=DTYPES, columns=[192, 4096])
def test_installed_bitsandbytes(dtype: torch.dtype, columns: int) -> None:
    """Its compiled library rounds some absmax values to the other neighbor in the dynamic map; nothing else differs."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="pip install bitsandbytes to compare with it")
    weight = torch.randn(300, columns, generator=torch.Generator().manual_seed(columns)).mul(0.02).to(dtype)
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    matrix = quantize_nf4(weight)
    assert torch.equal(matrix.tables, torch.cat((state.code, state.state2.code)))
    assert torch.equal(matrix.codes.flatten(), codes.flatten())
    torch.testing.assert_close(matrix.offsets, state.offset.expand_as(matrix.offsets), rtol=3e-7, atol=0)
    torch.testing.assert_close(matrix.scales, state.state2.absmax, rtol=1e-5, atol=0)
    ours, other = matrix.absmax_codes.flatten(), state.absmax.flatten()
    assert (ours != other).float().mean() < 0.005
    dynamic = state.state2.code
    assert (dynamic[ours.int()] - dynamic[other.int()]).abs().max() < 0.9 / 64 + 1e-6  # the widest gap of the map
    theirs = matrix._replace(
        absmax_codes=state.absmax.view_as(matrix.absmax_codes), scales=state.state2.absmax,
        offsets=state.offset.expand_as(matrix.offsets),
    )  # fmt: skip
    assert torch.equal(dequantize_nf4(theirs, dtype), functional.dequantize_4bit(codes, state))


def test_every_weight_becomes_the_nearest_of_the_16_values() -> None:
    weight = example(8, 128, torch.float32)
    matrix = quantize_nf4(weight)
    blocks = weight.view(-1, 64)
    scaled = (blocks / blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)).double()
    distances = (scaled.unsqueeze(-1) - torch.tensor(nf4.NF4)).abs()
    codes = torch.stack((matrix.codes >> 4, matrix.codes & 15), -1).view(-1, 64).long()
    chosen = distances.gather(-1, codes.unsqueeze(-1)).squeeze(-1)
    assert (chosen <= distances.amin(-1) + 1e-6).all()
    # The double quantization changes an absmax by a percent at most, relative to the largest.
    exact = torch.tensor(nf4.NF4)[codes] * blocks.abs().amax(1, keepdim=True)
    error = (dequantize_nf4(matrix, torch.float32).view(-1, 64) - exact).abs().max()
    assert 0 < error < 0.01 * weight.abs().max()


def test_size_and_unsupported_shapes() -> None:
    matrix = quantize_nf4(torch.randn(512, 4096))
    stored = sum(tensor.nbytes for tensor in matrix[:-1])
    assert stored * 8 / (512 * 4096) < 4.14
    with pytest.raises(UserError, match="10 x 96"):
        quantize_nf4(torch.randn(10, 96))


@pytest.mark.nightly  # torch imports its decompositions first
def test_matrices_without_memory_have_the_same_shapes() -> None:
    weight = example(100, 192)
    for fake, real in zip(quantize_nf4(weight.to("meta")), quantize_nf4(weight), strict=True):
        assert (fake.shape, fake.dtype, fake.device.type) == (real.shape, real.dtype, "meta")


def test_extreme_values() -> None:
    for value in (torch.inf, torch.nan):
        weight = example(4, 128)
        weight[2, 7] = value
        assert dequantize_nf4(quantize_nf4(weight), torch.bfloat16).isnan().any()
    assert not dequantize_nf4(quantize_nf4(torch.zeros(4, 128)), torch.float32).any()


# Shards.


@pairwise(columns=[192, 1024], column_shards=[1, 3, 16], row_shards=[1, 2, 5])
def test_shards_have_the_values_of_the_full_matrix(columns: int, column_shards: int, row_shards: int) -> None:
    """Boundaries of shards lie within groups of absmax values, and groups span several rows or end within one."""
    weight = example(100, columns)
    column_shards = min(column_shards, columns // 64)
    full, absmax = quantize_nf4(weight), nf4.block_absmax(weight)
    height, width = 100 // row_shards, -(-columns // 64 // column_shards) * 64
    for row in range(0, 100, height):
        for column in range(0, columns, width):
            part = slice(row, row + height), slice(column, column + width)
            shard = quantize_nf4(weight[part], absmax, row, column)
            assert_same(shard, nf4_part(full, *part))
            for dtype in DTYPES.values():
                assert torch.equal(dequantize_nf4(shard, dtype), dequantize_nf4(full, dtype)[part])


def test_concatenated_matrices_keep_their_values() -> None:
    weights = [example(30, 192), 3 * example(11, 192) + 1, example(7, 192)]
    matrices = [quantize_nf4(weight) for weight in weights]
    fused = concatenate_nf4(matrices)
    values = torch.cat([dequantize_nf4(matrix, torch.bfloat16) for matrix in matrices])
    assert torch.equal(dequantize_nf4(fused, torch.bfloat16), values)
    assert not torch.equal(dequantize_nf4(quantize_nf4(torch.cat(weights)), torch.bfloat16), values)
    part = nf4_part(fused, slice(25, 45), slice(64, 192))
    assert torch.equal(dequantize_nf4(part, torch.bfloat16), values[25:45, 64:])


def test_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = quantize_nf4(example(100, 192))
    expected = dequantize_nf4(matrix, torch.bfloat16)
    monkeypatch.setattr(nf4, "CHUNK_ELEMENTS", 7 * 192)
    assert torch.equal(dequantize_nf4(matrix, torch.bfloat16), expected)


# The kernel.


@needs_triton
@pairwise(shape=[(1, 64), (100, 192), (37, 1024)], dtype=DTYPES, part=[False, True])
def test_kernel(shape: tuple[int, int], dtype: torch.dtype, part: bool) -> None:
    from trainyard.kernels.triton.nf4 import dequantize

    matrix = concatenate_nf4([quantize_nf4(example(*shape)), quantize_nf4(example(*shape) * 5)])
    if part:
        matrix = nf4_part(matrix, slice(shape[0] // 2, None), slice(shape[1] // 128 * 64, None))
    expected = dequantize_nf4(matrix, dtype)
    out = torch.full(expected.shape, torch.nan, dtype=dtype, device=DEVICE)
    dequantize(*(tensor.to(DEVICE) for tensor in matrix), out)
    assert torch.equal(out.cpu(), expected)

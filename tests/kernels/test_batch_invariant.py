"""The batch-invariant Triton kernels against plain torch: in Triton's interpreter on a CPU, compiled on a GPU, where
tiles of all sizes must have the same bits."""

from itertools import pairwise as neighbors

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.test_triton_ops import DEVICE, DTYPES, close, random
from tests.support.pairwise import pairwise
from trainyard.kernels import batch_invariant
from trainyard.kernels.reference import AttentionScores
from trainyard.kernels.triton.invariant.attention import attention
from trainyard.kernels.triton.invariant.linear import FEW_ROWS_TILE, MANY_ROWS_TILE, LinearTile, linear
from trainyard.kernels.triton.invariant.log_softmax import log_softmax

needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter would take minutes")


@pairwise(dtype=DTYPES, rows=[1, 70], shape=[(72, 40), (33, 130)], has_bias=[False, True])
def test_linear(dtype: torch.dtype, rows: int, shape: tuple[int, int], has_bias: bool) -> None:
    x, weight = random(rows, shape[1], dtype=dtype), random(*shape, dtype=dtype)
    bias = random(shape[0], dtype=dtype) if has_bias else None
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    close(linear(x, weight, bias), expected.to(dtype), dtype)


@pairwise(
    dtype=DTYPES, heads=[(4, 4), (6, 2)], head_size=[16, 20], tokens=[1, 37, 70], first=[0, 100], window=[None, 24]
)
def test_attention(
    dtype: torch.dtype, heads: tuple[int, int], head_size: int, tokens: int, first: int, window: int | None
) -> None:
    q = random(2, heads[0], tokens, head_size, dtype=dtype)
    k, v = (random(2, heads[1], first + tokens + 3, head_size, dtype=dtype, seed=seed) for seed in (1, 2))
    positions = torch.tensor([first, max(first - 7, 0)], dtype=torch.int32, device=DEVICE)
    expected = batch_invariant.attend(*(x.cpu().float() for x in (q, k, v)), positions.cpu(), window)
    close(attention(q, k, v, positions, None, window), expected.to(DEVICE, dtype), dtype)


@pairwise(dtype=DTYPES, soft_cap=[None, 1.5], sinks=[True, False], value_size=[20, 7, 40], tokens=[1, 37])
def test_attention_with_other_scores(
    dtype: torch.dtype, soft_cap: float | None, sinks: bool, value_size: int, tokens: int
) -> None:
    q, k, v = (
        random(2, heads, tokens + 40, width, dtype=dtype) for heads, width in ((6, 20), (2, 20), (2, value_size))
    )
    scores = AttentionScores(0.3, soft_cap, random(6) if sinks else None)
    positions = torch.tensor([40, 33], dtype=torch.int32, device=DEVICE)
    expected = batch_invariant.attend(
        *(x.cpu().float() for x in (q[:, :, :tokens], k, v)), positions.cpu(), 24,
        scores._replace(sinks=scores.sinks if scores.sinks is None else scores.sinks.cpu()),
    )  # fmt: skip
    close(attention(q[:, :, :tokens], k, v, positions, None, 24, scores), expected.to(DEVICE, dtype), dtype)


@pytest.mark.parametrize("window", [None, 20])
def test_attention_within_documents(window: int | None) -> None:
    """Several documents in one tile of queries, and one over several tiles. Each is as if alone, bit for bit."""
    ends = (0, 5, 6, 47, 100)
    documents = torch.cat([torch.full((end - start,), i) for i, (start, end) in enumerate(neighbors(ends))])
    q, k, v = (random(1, heads, 100, 16, seed=heads) for heads in (3, 1, 1))
    first = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = attention(q, k, v, first, documents[None].int().to(DEVICE), window)
    for start, end in neighbors(ends):
        alone = attention(*(x[:, :, start:end] for x in (q, k, v)), first, None, window)
        assert torch.equal(out[:, :, start:end], alone)


@pytest.mark.parametrize("columns", [7, 5000])
def test_log_softmax(columns: int) -> None:
    logits = 4 * random(3, columns + 1)[:, :columns]
    close(log_softmax(logits), logits.log_softmax(-1), torch.float32)


@needs_gpu
def test_tiles_have_the_same_bits() -> None:
    tiles = [FEW_ROWS_TILE, MANY_ROWS_TILE, LinearTile(64, 64, 64, 4, 3), LinearTile(128, 256, 64, 8, 3)]
    for shape in ((2048, 2048), (5504, 2048), (2048, 5504), (300, 1000), (50257, 768)):
        x, weight = random(300, shape[1], dtype=torch.bfloat16), random(*shape, dtype=torch.bfloat16)
        expected = linear(x, weight, None, tiles[0])
        for tile in tiles[1:]:
            assert torch.equal(linear(x, weight, None, tile), expected), (shape, tile)


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_same_bits_whatever_their_number(dtype: torch.dtype) -> None:
    def check(compute: object, x: Tensor) -> None:
        expected = compute(x)  # type: ignore[operator]
        for rows in (1, 2, 31, 64, 65, 130):
            for start in (0, 7):
                part = x[start : start + rows].clone()
                assert torch.equal(compute(part), expected[start : start + rows]), (rows, start)  # type: ignore[operator]

    for shape in ((2048, 2048), (333, 1000), (50257, 768)):
        weight = random(*shape, dtype=dtype)
        check(lambda x, weight=weight: linear(x, weight, None), random(300, shape[1], dtype=dtype))
    for columns in (32000, 50257):
        check(log_softmax, random(200, columns))


@needs_gpu
@pairwise(dtype=DTYPES, heads=[(16, 16), (32, 8), (12, 4)], head_size=[64, 128, 80], window=[None, 300])
def test_a_query_alone_has_the_bits_of_one_in_a_sequence(
    dtype: torch.dtype, heads: tuple[int, int], head_size: int, window: int | None
) -> None:
    q = random(2, heads[0], 700, head_size, dtype=dtype)
    k, v = (random(2, heads[1], 700, head_size, dtype=dtype, seed=seed) for seed in (1, 2))
    first = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    expected = attention(q, k, v, first, None, window)
    for position in (0, 63, 64, 500, 699):
        alone = attention(q[:, :, position : position + 1], k, v, first + position, None, window)
        assert torch.equal(alone, expected[:, :, position : position + 1]), position
    rest = attention(q[:1, :, 450:], k[:1], v[:1], first[:1] + 450, None, window)
    assert torch.equal(rest, expected[:1, :, 450:])

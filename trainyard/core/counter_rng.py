"""Random numbers without state: each is a function of a key and an index.

Weights, dropout masks, stochastic rounding and sample order all come from here, so that no rank count, micro batch or
restart can change them. Integer steps are exact on every device and the normal numbers use products, sums and a table
only (no log, no cos), so a CPU and a GPU make the same bits.

Two mixers: `mix64` for what is made once (weights, order), `mix32` for what is made inside the step, where 64-bit
integers are slow on some devices. Both rely on integer products wrapping around.
"""

import hashlib
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20
"""Elements made at a time: small enough to stay near the cores, large enough to amortise the call."""
TABLE_BINS = 1 << 14
TAIL_SIGMAS = 4.5
"""Standard deviations at which the normal table ends."""

right_shift = torch.bitwise_right_shift
"""Not `>>`: on tensors torch_xla 2.9 makes it a division, which rounds negative numbers the other way."""


def key64(*words: object) -> int:
    """A signed 64-bit key from any words, the same on every machine."""
    text = "\x1f".join(str(word) for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def key32(*words: object) -> tuple[int, int]:
    """Two signed 32-bit keys from any words, for `mix32`."""
    value = key64(*words)
    return _signed32(value), _signed32(value >> 32)


def mix64(x: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 tensors."""
    x = (x ^ (right_shift(x, 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ (right_shift(x, 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ (right_shift(x, 31) & 0x1FFFFFFFF)


def mix32(x: Tensor) -> Tensor:
    """A 32-bit finaliser with low bias (two multiply-xorshift rounds) on int32 tensors."""
    x = (x ^ (right_shift(x, 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ (right_shift(x, 15) & 0x1FFFF)) * -0x2CA96A69
    return x ^ (right_shift(x, 15) & 0x1FFFF)


def row_seeds(key: Tensor, outer: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """Two random words for each row numbered by (outer, inner), say (sample, position).

    `key` holds two int32, for instance of seed and step. The numbers are mixed in one after the other, twice over with
    different keys, so that no two rows share both words although each has 32 bits only.
    """
    a = mix32(mix32(outer ^ key[0]) + inner * 0x2545F491)
    b = mix32(mix32(outer + key[1]) ^ inner * -0x7A143589)
    return a, b


def element_bits(seeds: tuple[Tensor, Tensor], site: Tensor, column: Tensor) -> Tensor:
    """A random int32 for each column (an int32 tensor that broadcasts) of each row (its words from `row32`).

    `site` tells uses of the same rows apart. Kept short on purpose: on GPUs these integer steps take longer than the
    memory that they are for, so the rows' words are made outside, once, and one mixer has to do here.
    """
    a, b = seeds
    return mix32((a + column * -0x61C88647) ^ (b + site * 0x7F4A7C15))


def normal_slice(key: int, total_columns: int, rows: slice, cols: slice, device: torch.device | str = "cpu") -> Tensor:
    """fp32 standard normal numbers for a slice of a matrix with `columns` columns, without making the rest of it."""
    low, step = _quantile_table(str(device))
    height, width = rows.stop - rows.start, cols.stop - cols.start
    out = torch.empty(height, width, device=device)
    column = torch.arange(cols.start, cols.stop, device=device)
    per_chunk = max(1, CHUNK_ELEMENTS // max(width, 1))
    for top in range(0, height, per_chunk):
        row = torch.arange(rows.start + top, min(rows.start + top + per_chunk, rows.stop), device=device)
        bits = mix64((row[:, None] * total_columns + column) * -0x61C8864680B583EB + key)
        place = right_shift(bits, 24) & (TABLE_BINS - 1)
        part = (bits & 0xFFFFFF).float() * 2.0**-24
        out[top : top + per_chunk] = low[place] + part * step[place]
    return out


@cache
def _quantile_table(device: str) -> tuple[Tensor, Tensor]:
    """Lower end and length of BINS equally likely pieces of the normal distribution, scaled to variance 1."""
    inverse = NormalDist().inv_cdf
    upper = [inverse(0.5 + i / TABLE_BINS) for i in range(1, TABLE_BINS // 2)] + [TAIL_SIGMAS]
    ends = torch.tensor([-x for x in reversed(upper)] + [0.0] + upper, dtype=torch.float64)
    a, b = ends[:-1], ends[1:]
    ends = ends / ((a * a + a * b + b * b) / 3).mean().sqrt()
    return ends[:-1].float().to(device), (ends[1:] - ends[:-1]).float().to(device)


def _signed32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value

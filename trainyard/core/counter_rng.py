"""Counter-based random numbers: every value is a pure function of a key and an index, with no generator state.

Weights, dropout masks, stochastic rounding and sample order all come from here, so that no rank count, micro batch size
or restart can change them. The integer steps are exact on every device, and normal numbers use only products, sums and
a table (no log, no cos), so a CPU and a GPU produce the same bits.

There are two mixers: `mix64` for values made once (weights, order) and `mix32` for values made inside the training
step, where 64-bit integers are slow on some devices. Both rely on wrap-around of integer products.
"""

import hashlib
import struct
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20
"""Elements generated at a time: few enough to fit the cache, enough to amortize the call."""
TABLE_BINS = 1 << 14
TAIL_SIGMAS = 4.5
"""Standard deviations at which the normal table ends."""

right_shift = torch.bitwise_right_shift
"""Use this instead of `>>`: torch_xla 2.9 turns `>>` into a division, which rounds negative numbers differently."""


class RowSeeds(NamedTuple):
    """Two random int32 values per row, from which `element_bits` derives the random bits of the row's elements."""

    seed0: Tensor
    seed1: Tensor


class DropoutRng(NamedTuple):
    """Everything that determines a dropout mask: no layout, micro batch or restart changes it."""

    p: float
    seed0: Tensor
    """`seed0` and `seed1` are the row seeds: one pair per token of an activation, or per query of attention."""
    seed1: Tensor
    site: Tensor
    """int32 that tells apart the uses of one row, such as the layers of a model."""
    head_offset: Tensor | None = None
    """Global index of this rank's first attention head; None for dropout of activations."""


def key64(*labels: object) -> int:
    """A signed 64-bit key hashed from any labels, equal on every machine."""
    text = "\x1f".join(str(label) for label in labels)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def key32(*labels: object) -> tuple[int, int]:
    """Two signed 32-bit keys hashed from any labels, for `mix32`."""
    low, high = struct.unpack("<ii", struct.pack("<q", key64(*labels)))
    return low, high


def mix64(x: Tensor) -> Tensor:
    """The splitmix64 finalizer on int64 tensors."""
    x = (x ^ (right_shift(x, 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ (right_shift(x, 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ (right_shift(x, 31) & 0x1FFFFFFFF)


def mix32(x: Tensor) -> Tensor:
    """A 32-bit finalizer with low bias (two multiply-xorshift rounds) on int32 tensors."""
    x = (x ^ (right_shift(x, 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ (right_shift(x, 15) & 0x1FFFF)) * -0x2CA96A69
    return x ^ (right_shift(x, 15) & 0x1FFFF)


def row_seeds(key: Tensor, outer: Tensor, inner: Tensor) -> RowSeeds:
    """The seeds of each row with index (outer, inner), for example (sample, position).

    `key` holds two int32, for example hashed from seed and step. Both indices are mixed in one after the other, twice
    and with different keys, so that no two rows share both seeds although each seed has only 32 bits.
    """
    a = mix32(mix32(outer ^ key[0]) + inner * 0x2545F491)
    b = mix32(mix32(outer + key[1]) ^ inner * -0x7A143589)
    return RowSeeds(a, b)


def element_bits(seeds: tuple[Tensor, Tensor], site: Tensor, column: Tensor) -> Tensor:
    """A random int32 for each column (an int32 tensor that broadcasts) of each row, given the rows' seeds.

    `site` separates uses of the same rows. This function is short on purpose: on GPUs these integer steps take longer
    than the memory traffic they accompany, so the row seeds are computed once outside and one mixer must do here.
    """
    a, b = seeds
    return mix32((a + column * -0x61C88647) ^ (b + site * 0x7F4A7C15))


def uniform_slice(key: int, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
    """fp32 values between 0 and 1 at these places of a vector."""
    bits = mix64(torch.arange(start, stop, device=device) * -0x61C8864680B583EB + key)
    return ((bits & 0xFFFFFF).float() + 0.5) * 2.0**-24


def normal_slice(key: int, total_columns: int, rows: slice, cols: slice, device: torch.device | str = "cpu") -> Tensor:
    """fp32 standard normal values of a slice of a matrix with `total_columns` columns, without computing the rest."""
    low, step = _quantile_table(str(device))
    height, width = rows.stop - rows.start, cols.stop - cols.start
    out = torch.empty(height, width, device=device)
    column = torch.arange(cols.start, cols.stop, device=device)
    per_chunk = max(1, CHUNK_ELEMENTS // max(width, 1))
    for top in range(0, height, per_chunk):
        row = torch.arange(rows.start + top, min(rows.start + top + per_chunk, rows.stop), device=device)
        bits = mix64((row[:, None] * total_columns + column) * -0x61C8864680B583EB + key)
        table_bin = right_shift(bits, 24) & (TABLE_BINS - 1)
        fraction = (bits & 0xFFFFFF).float() * 2.0**-24
        out[top : top + per_chunk] = low[table_bin] + fraction * step[table_bin]
    return out


@cache
def _quantile_table(device: str) -> tuple[Tensor, Tensor]:
    """Lower end and length of TABLE_BINS equally likely intervals of the normal distribution, scaled to variance 1."""
    inverse = NormalDist().inv_cdf
    upper = [inverse(0.5 + i / TABLE_BINS) for i in range(1, TABLE_BINS // 2)] + [TAIL_SIGMAS]
    ends = torch.tensor([-x for x in reversed(upper)] + [0.0] + upper, dtype=torch.float64)
    a, b = ends[:-1], ends[1:]
    ends = ends / ((a * a + a * b + b * b) / 3).mean().sqrt()
    return ends[:-1].float().to(device), (ends[1:] - ends[:-1]).float().to(device)

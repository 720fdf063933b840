"""Random numbers by key and index: any slice is the slice of the whole, and they are random enough."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.core.counter_rng import element_bits, key32, key64, mix32, normal_slice, row_seeds


@given(st.integers(1, 40), st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_a_slice_is_the_slice_of_the_whole(rows: int, columns: int, data: st.DataObject) -> None:
    top = data.draw(st.integers(0, rows - 1))
    left = data.draw(st.integers(0, columns - 1))
    bottom, right = data.draw(st.integers(top + 1, rows)), data.draw(st.integers(left + 1, columns))
    whole = normal_slice(7, columns, slice(0, rows), slice(0, columns))
    assert torch.equal(normal_slice(7, columns, slice(top, bottom), slice(left, right)), whole[top:bottom, left:right])


def test_slices_across_chunks() -> None:
    whole = normal_slice(3, 3000, slice(0, 1000), slice(0, 3000))  # three chunks
    assert torch.equal(normal_slice(3, 3000, slice(345, 700), slice(0, 3000)), whole[345:700])
    assert torch.equal(normal_slice(3, 3000, slice(0, 1000), slice(1500, 2250)), whole[:, 1500:2250])


def test_normal_moments_and_tails() -> None:
    x = normal_slice(key64("moments"), 2000, slice(0, 2000), slice(0, 2000)).double()
    assert abs(x.mean()) < 2e-3
    assert abs(x.var() - 1) < 2e-3
    assert abs((x**4).mean() - 3) < 0.03
    for z, tail in ((1.0, 0.3173), (2.0, 0.0455), (3.0, 0.0027)):
        assert (x.abs() > z).double().mean() == pytest.approx(tail, rel=0.03)
    neighbours = (x[:, 1:] * x[:, :-1]).mean(), (x[1:] * x[:-1]).mean()
    assert max(abs(c) for c in neighbours) < 2e-3


def test_keys_give_unrelated_numbers() -> None:
    a, b = (normal_slice(key64(seed, "w"), 1000, slice(0, 500), slice(0, 1000)) for seed in (0, 1))
    assert abs((a * b).mean()) < 6e-3
    assert not torch.equal(a, b)
    assert key64("a", "bc") != key64("ab", "c")


def test_mix32_spreads_bits() -> None:
    x = torch.arange(1 << 16, dtype=torch.int32)
    mixed = mix32(x)
    assert len(mixed.unique()) == len(x)
    for bit in range(32):
        assert abs(((mixed >> bit) & 1).double().mean() - 0.5) < 0.01
        flipped = mix32(x ^ (1 << bit if bit < 31 else -(1 << 31))) ^ mixed
        changed = sum(((flipped >> k) & 1).double().mean() for k in range(32)) / 32
        assert abs(changed - 0.5) < 0.02


def rows(count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    key = torch.tensor(key32(1, "x"), dtype=torch.int32)
    a, b = row_seeds(key, torch.arange(count, dtype=torch.int32)[:, None], torch.arange(8, dtype=torch.int32))
    return a[..., None], b[..., None]


def cells(row: tuple[torch.Tensor, torch.Tensor], site: torch.Tensor) -> torch.Tensor:
    return element_bits(row, site, torch.arange(256, dtype=torch.int32))


SITES = [torch.tensor(number, dtype=torch.int32) for number in (5, 6)]


def test_cells_differ_by_row_column_and_site() -> None:
    x, other = (cells(rows(), site) for site in SITES)
    assert x.shape == (64, 8, 256)
    assert len(x.unique()) > 0.99 * x.numel()
    assert ((x ^ other) == 0).double().mean() < 1e-3
    for bit in range(32):
        ones = ((x >> bit) & 1).double()
        assert abs(ones.mean() - 0.5) < 0.01
        assert ones.mean(-1).std() < 0.05  # no row is biased
        assert ones.mean((0, 1)).std() < 0.05  # nor a column


def test_compiled_cells_have_the_same_bits() -> None:
    assert torch.equal(torch.compile(cells, dynamic=False)(rows(), SITES[0]), cells(rows(), SITES[0]))


DRAW = """
import re
from trainyard.core.tensor_slice import TensorSlice
from trainyard.models.init import normal_values

def most():  # resident so far; getrusage would know what the parent had
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

normal_values(TensorSlice.full("w", (2048, 2048)), 0, "cpu")  # threads are up
embedding = TensorSlice.full("embedding.weight", (128256, 8192))
before = most()
for dim, size in ((0, 128256), (1, 8192)):
    normal_values(embedding.narrow(dim, size // 32 * 3, size // 32 * 4), 0, "cpu")
print(most() - before)
"""


def test_a_slice_of_a_large_matrix_needs_little_memory() -> None:
    """1/32 of 128256 x 8192 (the embedding of Llama 3 70B) is made within 1 GiB, either way it is cut, and not in less
    than it takes itself: so the measure is one."""
    done = subprocess.run([sys.executable, "-c", DRAW], capture_output=True, text=True, check=True)
    took = int(done.stdout)
    assert 128256 * 8192 // 32 * 4 / 2 <= took <= 2**30  # pages of the first draw serve again

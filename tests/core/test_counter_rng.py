"""Counter-based random numbers: any slice equals the slice of the full matrix, and the bits are random enough."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from trainyard.core.counter_rng import RowSeeds, element_bits, key32, key64, mix32, normal_slice, row_seeds


@given(st.integers(1, 40), st.integers(1, 40), st.data())
@examples(60)
def test_a_slice_equals_the_slice_of_the_full_matrix(rows: int, columns: int, data: st.DataObject) -> None:
    top = data.draw(st.integers(0, rows - 1))
    left = data.draw(st.integers(0, columns - 1))
    bottom, right = data.draw(st.integers(top + 1, rows)), data.draw(st.integers(left + 1, columns))
    full = normal_slice(7, columns, slice(0, rows), slice(0, columns))
    assert torch.equal(normal_slice(7, columns, slice(top, bottom), slice(left, right)), full[top:bottom, left:right])


def test_slices_across_chunks() -> None:
    full = normal_slice(3, 3000, slice(0, 1000), slice(0, 3000))  # three chunks
    assert torch.equal(normal_slice(3, 3000, slice(345, 700), slice(0, 3000)), full[345:700])
    assert torch.equal(normal_slice(3, 3000, slice(0, 1000), slice(1500, 2250)), full[:, 1500:2250])


def test_normal_moments_tails_and_correlation() -> None:
    x = normal_slice(key64("moments"), 2000, slice(0, 2000), slice(0, 2000)).double()
    assert abs(x.mean()) < 2e-3
    assert abs(x.var() - 1) < 2e-3
    assert abs((x**4).mean() - 3) < 0.03
    for z, tail in ((1.0, 0.3173), (2.0, 0.0455), (3.0, 0.0027)):
        assert (x.abs() > z).double().mean() == pytest.approx(tail, rel=0.03)
    correlations = (x[:, 1:] * x[:, :-1]).mean(), (x[1:] * x[:-1]).mean()
    assert max(abs(c) for c in correlations) < 2e-3


def test_keys_give_uncorrelated_numbers() -> None:
    a, b = (normal_slice(key64(seed, "w"), 1000, slice(0, 500), slice(0, 1000)) for seed in (0, 1))
    assert abs((a * b).mean()) < 6e-3
    assert not torch.equal(a, b)
    assert key64("a", "bc") != key64("ab", "c")


def test_mix32_flips_half_of_the_bits() -> None:
    x = torch.arange(1 << 16, dtype=torch.int32)
    mixed = mix32(x)
    assert len(mixed.unique()) == len(x)
    for bit in range(32):
        assert abs(((mixed >> bit) & 1).double().mean() - 0.5) < 0.01
        flipped = mix32(x ^ (1 << bit if bit < 31 else -(1 << 31))) ^ mixed
        changed = sum(((flipped >> k) & 1).double().mean() for k in range(32)) / 32
        assert abs(changed - 0.5) < 0.02


def seeds(count: int = 64) -> RowSeeds:
    key = torch.tensor(key32(1, "x"), dtype=torch.int32)
    a, b = row_seeds(key, torch.arange(count, dtype=torch.int32)[:, None], torch.arange(8, dtype=torch.int32))
    return RowSeeds(a[..., None], b[..., None])


def bits(rows: RowSeeds, site: torch.Tensor) -> torch.Tensor:
    return element_bits(rows, site, torch.arange(256, dtype=torch.int32))


SITES = [torch.tensor(site, dtype=torch.int32) for site in (5, 6)]


def test_bits_differ_by_row_column_and_site() -> None:
    x, other = (bits(seeds(), site) for site in SITES)
    assert x.shape == (64, 8, 256)
    assert len(x.unique()) > 0.99 * x.numel()
    assert ((x ^ other) == 0).double().mean() < 1e-3
    for bit in range(32):
        ones = ((x >> bit) & 1).double()
        assert abs(ones.mean() - 0.5) < 0.01
        assert ones.mean(-1).std() < 0.05  # no row is biased
        assert ones.mean((0, 1)).std() < 0.05  # no column is biased


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_bits_are_equal(backend: str) -> None:
    compiled = torch.compile(bits, dynamic=False, backend=backend)
    assert torch.equal(compiled(seeds(), SITES[0]), bits(seeds(), SITES[0]))


MEASURE_PEAK = """
import re
from trainyard.core.tensor_slice import TensorSlice
from trainyard.models.init import normal_values

def peak_bytes():  # of this process; getrusage would include the parent's peak before exec
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

normal_values(TensorSlice.full("w", (256, 256)), 0, "cpu")  # start torch's threads
embedding = TensorSlice.full("embedding.weight", (ROWS, 8192))
before = peak_bytes()
for dim, size in ((0, ROWS), (1, 8192)):
    normal_values(embedding.narrow(dim, size // 32 * 3, size // 32 * 4), 0, "cpu")
print(peak_bytes() - before)
"""


@pytest.mark.parametrize("rows", [8192, pytest.param(128256, marks=pytest.mark.nightly)])
def test_a_slice_of_a_large_matrix_needs_little_memory(rows: int) -> None:
    """1/32 of rows x 8192 (128256 rows is the embedding of Llama 3 70B), by rows or by columns, needs less than the
    full matrix and at most 1 GiB, and not less than half of itself, which shows that the measurement works."""
    code = MEASURE_PEAK.replace("ROWS", str(rows))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    slice_bytes = rows * 8192 // 32 * 4
    assert slice_bytes / 2 <= int(done.stdout) <= min(32 * slice_bytes, 2**30)

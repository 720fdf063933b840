"""Random bits in Triton kernels: what `random.mix32` and `random.cell32` draw."""

import triton
import triton.language as tl


@triton.jit
def mix32(x):  # type: ignore[no-untyped-def]
    """`random.mix32`, on uint32, whose shift is the logical one."""
    x = x.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD3569597
    return x ^ (x >> 15)


@triton.jit
def row_keep_mask(first, second, site, row, column, threshold):  # type: ignore[no-untyped-def]
    """Which elements of a row stay under dropout, by `random.cell32`."""
    a = tl.load(first + row).to(tl.uint32)
    b = tl.load(second + row).to(tl.uint32) + tl.load(site).to(tl.uint32) * 0x7F4A7C15
    x = mix32((a + column.to(tl.uint32) * 0x9E3779B9) ^ b)
    return (x & 0x7FFFFFFF).to(tl.int32) >= threshold

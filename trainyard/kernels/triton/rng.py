"""The counter-based random bits of `core.counter_rng`, inside Triton kernels."""

from trainyard.kernels.triton.language import tl, triton


@triton.jit
def mix32(x):  # type: ignore[no-untyped-def]
    """`counter_rng.mix32` on uint32, whose right shift is logical."""
    x = x.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD3569597
    return x ^ (x >> 15)


@triton.jit
def row_keep_mask(seed0, seed1, site, row, column, threshold):  # type: ignore[no-untyped-def]
    """Which elements of a row survive dropout, by `counter_rng.element_bits`."""
    a = tl.load(seed0 + row).to(tl.uint32)
    b = tl.load(seed1 + row).to(tl.uint32) + tl.load(site).to(tl.uint32) * 0x7F4A7C15
    x = mix32((a + column.to(tl.uint32) * 0x9E3779B9) ^ b)
    return (x & 0x7FFFFFFF).to(tl.int32) >= threshold

"""`random.mix32` for Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def mix(x):  # type: ignore[no-untyped-def]
    """On uint32, whose shift is the logical one."""
    x = x.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD3569597
    return x ^ (x >> 15)

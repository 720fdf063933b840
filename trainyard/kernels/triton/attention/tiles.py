"""Building blocks of the attention kernels: loads and stores of rows, masks, and dropout bits.

Shapes: blocks of M queries and N keys, head dim K padded to BLOCK_K.
"""

from trainyard.kernels.triton.language import tl, triton
from trainyard.kernels.triton.rng import mix32

IN_INTERPRETER = tl.constexpr(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b, acc=None):  # type: ignore[no-untyped-def]
    if IN_INTERPRETER:  # the interpreter multiplies the bits of bf16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def capped(score, soft_cap):  # type: ignore[no-untyped-def]
    """c tanh(score / c), both times log2(e)."""
    return soft_cap * (2 * tl.sigmoid(2 * score / soft_cap) - 1)


@triton.jit
def keep_mask(a, b, column, threshold):  # type: ignore[no-untyped-def]
    """Which weights survive dropout: `counter_rng.element_bits` of broadcast `query_seeds` and `key_terms`."""
    return (mix32((a + column) ^ b) & 0x7FFFFFFF).to(tl.int32) >= threshold


@triton.jit
def query_seeds(seed0, seed1, site, query):  # type: ignore[no-untyped-def]
    """Seeds of queries, with the site's contribution (an integer here) already added."""
    a, b = tl.load(seed0 + query).to(tl.uint32), tl.load(seed1 + query).to(tl.uint32)
    return a, b + site.to(tl.uint32) * 0x7F4A7C15


@triton.jit
def head_bits(head_offset, head):  # type: ignore[no-untyped-def]
    """A head's contribution to `key_terms`, computed before the loop over keys."""
    return (tl.load(head_offset) + head).to(tl.uint32) * 0x10001 * 0x9E3779B9


@triton.jit
def key_terms(key, head_term):  # type: ignore[no-untyped-def]
    """Contribution of keys, numbered within their sequence, to the random bits of a head."""
    return key.to(tl.uint32) * 0x9E3779B9 + head_term


@triton.jit
def bounds_mask(row, length, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    mask = row[:, None] < length
    if K < BLOCK_K:
        mask = mask & (tl.arange(0, BLOCK_K)[None, :] < K)
    return mask


@triton.jit
def load_rows(x, stride, row, length, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load rows of one sequence and head; rows beyond its end are zeros, whatever memory holds there."""
    address = x + row[:, None] * stride + tl.arange(0, BLOCK_K)[None, :]
    return tl.load(address, mask=bounds_mask(row, length, K, BLOCK_K), other=0.0)


@triton.jit
def store_rows(x, stride, row, length, value, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    address = x + row[:, None] * stride + tl.arange(0, BLOCK_K)[None, :]
    tl.store(address, value.to(x.dtype.element_ty), mask=bounds_mask(row, length, K, BLOCK_K))


@triton.jit
def zero_rows(x, stride, start_row, end_row, step, ROWS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write zeros to a block of rows at every `step` rows, up to `end_row`."""
    for start in range(start_row, end_row, step):
        row = start + tl.arange(0, ROWS)
        store_rows(x, stride, row, end_row, tl.zeros((ROWS, BLOCK_K), tl.float32), K, BLOCK_K)


@triton.jit
def zero_dropped(keep, weight, keep_scale):  # type: ignore[no-untyped-def]
    """Zero the dropped weights. `keep_scale - keep_scale` is a zero that the compiler cannot see: with a literal zero
    it selects after the conversion to bf16, on half registers, with more instructions (Triton 3.6)."""
    return tl.where(keep, weight, keep_scale - keep_scale)


@triton.jit
def key_ranges(start_row, length, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """End of the keys that all M queries from `start_row` see in full blocks of N, and end of the keys any of them
    sees."""
    if CAUSAL:
        return start_row, tl.minimum(start_row + M, length)
    return length // N * N, length


@triton.jit
def window_start(start_row, WINDOW: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key, in full blocks of N, that a query from `start_row` on sees."""
    return tl.maximum(start_row - WINDOW + 1, 0) // N * N


@triton.jit
def mask_scores(score, query, key, length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mask the scores of a partly visible block. If causal, keys beyond the end come after all valid queries. With a
    window, a query may see no key of a block: what a finite score adds there vanishes with its first key."""
    if WINDOW:
        return tl.where((query[:, None] >= key[None, :]) & (query[:, None] - key[None, :] < WINDOW), score, -1e30)
    if CAUSAL:
        return tl.where(query[:, None] >= key[None, :], score, float("-inf"))
    return score + tl.where(key < length, 0.0, float("-inf"))[None, :]

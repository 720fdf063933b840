"""The kernels against their plain twin: through Triton's interpreter on a CPU, for real where there is a GPU.

In the interpreter products of bf16 are made in fp32, of operands rounded to bf16.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from trainyard.core.counter_rng import element_bits, row_seeds
from trainyard.kernels.reference import AttentionDropout, Kernels
from trainyard.kernels.triton.attention import (
    block_sizes,
    varlen_attention,
    varlen_attention_forward,
    varlen_attention_reference,
)
from trainyard.kernels.triton.ops import TritonKernels
from trainyard.models.layers import CoreAttention, Draw
from trainyard.parallel.tensor_parallel import Axes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no GPU: the interpreter would take minutes")
Attend = Callable[[Tensor, int, int, Tensor, int, bool, AttentionDropout | None], Tensor]


class Case(NamedTuple):
    product: Tensor
    dout: Tensor
    starts: Tensor
    longest: int
    causal: bool
    dropout: AttentionDropout | None
    heads: tuple[int, int, int]

    def run(self, function: Attend, dtype: torch.dtype) -> list[Tensor]:
        """Output and the gradients of queries, keys and values."""
        H, G, K = self.heads
        qkv = self.product.to(dtype).detach().requires_grad_()
        y = function(qkv, H, G, self.starts, self.longest, self.causal, self.dropout)
        (gradient,) = torch.autograd.grad(y, qkv, self.dout.to(dtype))
        return [y.detach(), *torch.split(gradient, [H * K, G * K, G * K], -1)]


def make(
    lengths: tuple[int, ...],
    heads: tuple[int, int, int],
    causal: bool,
    p: float = 0.0,
    filler: int = 5,
    dtype: torch.dtype = torch.float32,
) -> Case:
    H, G, K = heads
    used = sum(lengths)
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    product = torch.randn(used + filler, (H + 2 * G) * K, device=DEVICE).to(dtype)
    dout = torch.randn(used + filler, H, K, device=DEVICE).to(dtype)
    product[used:], dout[used:] = torch.nan, torch.inf
    return Case(product, dout, starts, max(lengths), causal, words(used + filler, p), heads)


def words(tokens: int, p: float, site: int = 0x1234567, first_head: int = 3) -> AttentionDropout | None:
    if p == 0:
        return None
    numbers = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    key = torch.tensor([12345, -6789], dtype=torch.int32, device=DEVICE)
    place = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (site, first_head)]
    return AttentionDropout(p, *row_seeds(key, numbers // 7, numbers % 7), *place)


def compare(case: Case) -> None:
    """fp32 within 1e-5; bf16 within 1% of fp32 in norm (bf16 itself rounds by 0.2% on average)."""
    dtype, used = case.product.dtype, int(case.starts[-1])
    for mine, wanted in zip(
        case.run(varlen_attention, dtype), case.run(varlen_attention_reference, torch.float32), strict=True
    ):
        assert mine.dtype == dtype
        assert not mine[used:].any()
        if dtype == torch.float32:
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
        else:
            assert (mine.float() - wanted).norm() < 0.01 * wanted.norm()


# Lengths with none, one, and whole blocks of tokens; heads are (H, G, K).
EXACT = [
    ((5, 0, 1, 32), (2, 2, 16)),
    ((33, 0, 32), (2, 1, 64)),
    ((16, 0, 17), (2, 1, 96)),
]
ROUNDED = [
    ((128, 0, 1, 100), (1, 1, 64)),
    ((64, 0, 7), (2, 2, 96)),
    ((100,), (2, 1, 16)),
    ((129, 0, 1), (2, 1, 64)),
    ((160,), (1, 1, 96)),
]


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("lengths", "heads"), EXACT)
def test_fp32(lengths: tuple[int, ...], heads: tuple[int, int, int], causal: bool, p: float) -> None:
    compare(make(lengths, heads, causal, p))


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("lengths", "heads"), ROUNDED)
def test_bf16(lengths: tuple[int, ...], heads: tuple[int, int, int], causal: bool, p: float) -> None:
    compare(make(lengths, heads, causal, p, dtype=torch.bfloat16))


@pytest.mark.parametrize("longest", [64, 128, 512, 2048])
@pytest.mark.parametrize("K", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("bf16", [True, False])
def test_blocks_divide(longest: int, K: int, bf16: bool) -> None:
    """Under a causal mask the loops meet at the diagonal, which lies at a whole block of either."""
    for R in (1, 4):
        forward, alone, dq = (block_sizes(name, K, R, longest, bf16) for name in ("forward", "alone", "dq"))
        dkdv = block_sizes("dkdv", K, R, longest, bf16)
        assert all(size.queries % size.keys == 0 for size in (forward, alone, dq))
        assert dkdv.keys % dkdv.queries == 0


@pytest.mark.parametrize(
    ("lengths", "G", "filler"), [((0, 0), 1, 300), ((9, 20), 2, 0), ((9, 20), 2, 200), ((9,), 1, 150)]
)
def test_filler(lengths: tuple[int, ...], G: int, filler: int) -> None:
    """None, much more than the longest sequence, nothing else. Memory that is not written to holds nan here."""
    case = make(lengths, (2, G, 16), True, 0.1, filler, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        assert case.product.new_empty(1).isnan()
        results = case.run(varlen_attention, torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)
    for x in results:
        assert not x[sum(lengths) :].any()
        assert x.isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(20, 1), (40, 1)])
def test_scores_far_from_zero(lengths: tuple[int, ...], causal: bool) -> None:
    """All scores of a query at -250 or so, where exp2 of minus their log-sum-exp is inf."""
    case = make(lengths, (2, 2, 16), causal, 0.1, filler=0)
    case.product[:, :32] += 20
    case.product[:, 32:64] = 0.01 * case.product[:, 32:64] - 3
    for x, y in zip(
        case.run(varlen_attention, torch.float32), case.run(varlen_attention_reference, torch.float32), strict=True
    ):
        assert (x - y).norm() < 1e-4 * y.norm()


@pytest.mark.parametrize("causal", [True, False])
def test_drops_what_core_attention_drops(causal: bool) -> None:
    B, T, H, K, p = 2, 40, 2, 16, 0.2
    core = CoreAttention(H, H, causal, p, "a site", Axes().tp, Axes().cp).to(DEVICE)
    core.first_head.fill_(4)
    sample = torch.tensor([[7], [3]], dtype=torch.int32, device=DEVICE)
    key = torch.tensor([11, -13], dtype=torch.int32, device=DEVICE)
    first, second = row_seeds(key, sample, torch.arange(T, dtype=torch.int32, device=DEVICE))
    q, k, v = (torch.randn(B, H, T, K, device=DEVICE, requires_grad=True) for _ in range(3))
    dout = torch.randn(B, H, T, K, device=DEVICE)
    y = core(q, k, v, None, Draw(first, second))
    wanted = [y, *torch.autograd.grad(y, (q, k, v), dout)]

    starts = torch.arange(B + 1, dtype=torch.int32, device=DEVICE) * T
    drops = AttentionDropout(p, first.flatten(), second.flatten(), core.site, core.first_head)
    parts = [x.detach().transpose(1, 2).reshape(B * T, H * K) for x in (q, k, v)]
    qkv = torch.cat(parts, -1).requires_grad_()
    z = varlen_attention(qkv, H, H, starts, T, causal, drops)
    (gradient,) = torch.autograd.grad(z, qkv, dout.transpose(1, 2).reshape(B * T, H, K))
    for x, y in zip([z.flatten(1), *gradient.chunk(3, -1)], wanted, strict=True):
        torch.testing.assert_close(x.view(B, T, H, K).transpose(1, 2), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_core_attention_takes_the_kernel_and_gives_the_same(causal: bool) -> None:
    B, T, H, K, p = 2, 20, 2, 16, 0.2
    tokens = torch.arange(T, dtype=torch.int32, device=DEVICE)
    key = torch.tensor([11, -13], dtype=torch.int32, device=DEVICE)
    draw = Draw(*row_seeds(key, torch.tensor([[7], [3]], dtype=torch.int32, device=DEVICE), tokens))
    flat = torch.randn(B, T, 3 * H * K, device=DEVICE)
    results = []
    for kernels in (TritonKernels(), Kernels()):
        core = CoreAttention(H, H, causal, p, "a site", Axes().tp, Axes().cp, kernels).to(DEVICE)
        for given in ((flat,), flat.chunk(3, -1)):
            results.append(core.forward_qkv(given, K, None, draw))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_each_bit(dtype: torch.dtype) -> None:
    """With equal scores and values of one each, the output shows which weights were dropped."""
    T, H, K, p = 64, 2, 64, 0.3
    drops = words(T, p)
    assert drops is not None
    starts = torch.tensor([0, T], dtype=torch.int32, device=DEVICE)
    zero = torch.zeros(T, H, K, dtype=dtype, device=DEVICE)
    value = torch.eye(T, dtype=dtype, device=DEVICE)[:, None].expand(T, H, K)
    qkv = torch.cat([x.flatten(1) for x in (zero, zero, value)], -1)
    weight = varlen_attention(qkv, H, H, starts, T, False, drops)
    head = torch.arange(H, dtype=torch.int32, device=DEVICE)[:, None] + drops.head_offset
    column = head * 0x10001 + torch.arange(T, dtype=torch.int32, device=DEVICE)
    row = drops.seed0[:, None, None], drops.seed1[:, None, None]
    keep = (element_bits(row, drops.site, column) & 0x7FFFFFFF) >= round(p * 2**31)
    assert (weight.ne(0) == keep).all()
    assert abs(keep.float().mean() - (1 - p)) < 0.02
    torch.testing.assert_close(weight[keep].float().mean().item(), 1 / T / (1 - p), rtol=1e-2, atol=0.0)


def test_another_mask_is_seen() -> None:
    case = make((9, 30), (2, 2, 16), False, 0.1)
    drops = case.dropout
    assert drops is not None
    same = case.run(varlen_attention, torch.float32)
    others = [
        drops._replace(site=drops.site + 1),
        drops._replace(first_head=drops.head_offset + 1),
        drops._replace(first=drops.seed0.roll(1)),
        drops._replace(second=drops.seed1.roll(1)),
        drops._replace(p=0.2),
        None,
    ]
    for other in others:
        for x, y in zip(case._replace(dropout=other).run(varlen_attention, torch.float32), same, strict=True):
            assert (x - y).norm() > 0.1 * y.norm()


def test_operator_rules() -> None:
    """Schema, shapes without data, gradients: as torch.compile and autograd take the operator to be."""
    case = make((9, 0, 20), (1, 1, 16), True, 0.1)
    qkv = case.product.detach().nan_to_num().requires_grad_()
    assert case.dropout is not None
    p, *tensors = case.dropout
    torch.library.opcheck(varlen_attention_forward, (qkv, case.starts, *tensors, 1, 1, p, case.longest, True))
    torch.library.opcheck(varlen_attention_forward, (qkv, case.starts, *[None] * 4, 1, 1, 0.0, case.longest, False))


def test_inside_a_compiled_graph() -> None:
    case = make((9, 20), (2, 2, 16), True, 0.1)
    compiled = torch.compile(varlen_attention, fullgraph=True, backend="aot_eager")
    wanted = case.run(varlen_attention, torch.float32)
    for x, y in zip(case.run(compiled, torch.float32), wanted, strict=True):
        assert torch.equal(x, y)


@needs_gpu
@pytest.mark.parametrize("lengths", [(64, 0, 7), (33, 100, 1, 128), (300, 129)])
@pytest.mark.parametrize("K", [8, 24, 40, 64, 72, 80, 96, 112, 128, 160])
def test_many_head_sizes(K: int, lengths: tuple[int, ...]) -> None:
    """Compilers have their own ideas about each: products were seen that read past the end of shared memory."""
    for R in (1, 2):
        for causal in (True, False):
            compare(make(lengths, (2, 2 // R, K), causal, 0.0, dtype=torch.bfloat16))


@needs_gpu
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(
    ("lengths", "heads", "causal"),
    [
        (tuple(128 - i % 3 * i for i in range(40)), (16, 16, 64), False),
        (tuple(512 - 11 * i for i in range(40)), (16, 16, 64), False),
        ((2048, 2048), (12, 12, 64), True),
        ((2048, 1000), (8, 8, 96), True),
        ((2048, 1000), (8, 2, 128), True),
    ],
)
def test_sizes_of_real_models(lengths: tuple[int, ...], heads: tuple[int, int, int], causal: bool, p: float) -> None:
    case = make(lengths, heads, causal, p, 200, torch.bfloat16)
    compare(case)
    for x, y in zip(
        case.run(varlen_attention, torch.bfloat16), case.run(varlen_attention, torch.bfloat16), strict=True
    ):
        assert torch.equal(x, y)

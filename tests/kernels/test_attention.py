"""Attention kernels against the reference: in Triton's interpreter on a CPU, compiled on a GPU.

The interpreter multiplies bf16 operands in fp32.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.pairwise import each_value
from trainyard.core.counter_rng import DropoutRng, RowSeeds, element_bits, row_seeds
from trainyard.kernels.reference import Kernels, counter_dropout, split_qkv
from trainyard.kernels.triton.attention.ops import block_sizes, varlen_attention, varlen_attention_forward
from trainyard.kernels.triton.ops import TritonKernels
from trainyard.models.layers import CoreAttention
from trainyard.parallel.axes import Axes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter would take minutes")
AttentionFunction = Callable[[Tensor, int, int, Tensor, int, bool, DropoutRng | None], Tensor]


class Case(NamedTuple):
    """Inputs of one attention call; `heads` is (H, G, K)."""

    qkv: Tensor
    dout: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    causal: bool
    dropout: DropoutRng | None
    heads: tuple[int, int, int]

    def run(self, function: AttentionFunction, dtype: torch.dtype) -> list[Tensor]:
        """Return the output and the gradients of queries, keys and values."""
        H, G, K = self.heads
        leaf = self.qkv.to(dtype).detach().requires_grad_()
        y = function(leaf, H, G, self.cu_seqlens, self.max_seqlen, self.causal, self.dropout)
        (gradient,) = torch.autograd.grad(y, leaf, self.dout.to(dtype))
        return [y.detach(), *torch.split(gradient, [H * K, G * K, G * K], -1)]


def make(
    lengths: tuple[int, ...],
    heads: tuple[int, int, int],
    causal: bool,
    p: float = 0.0,
    padding: int = 5,
    dtype: torch.dtype = torch.float32,
) -> Case:
    H, G, K = heads
    tokens = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    qkv = torch.randn(tokens + padding, (H + 2 * G) * K, device=DEVICE).to(dtype)
    dout = torch.randn(tokens + padding, H, K, device=DEVICE).to(dtype)
    qkv[tokens:], dout[tokens:] = torch.nan, torch.inf
    return Case(qkv, dout, cu_seqlens, max(lengths), causal, make_dropout(tokens + padding, p), heads)


def make_dropout(tokens: int, p: float, site: int = 0x1234567, head_offset: int = 3) -> DropoutRng | None:
    if p == 0:
        return None
    token = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    key = torch.tensor([12345, -6789], dtype=torch.int32, device=DEVICE)
    ids = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (site, head_offset)]
    return DropoutRng(p, *row_seeds(key, token // 7, token % 7), *ids)


def varlen_attention_reference(
    qkv: Tensor, H: int, G: int, cu_seqlens: Tensor, max_seqlen: int, causal: bool, dropout: DropoutRng | None = None
) -> Tensor:
    """`varlen_attention` in fp32 with full score matrices."""
    q, k, v = split_qkv(qkv, H, G)
    bounds = cu_seqlens.tolist()
    outputs = []
    for start, end in itertools.pairwise(bounds):
        assert end - start <= max_seqlen
        q_HTK, k_HTK, v_HTK = (x[start:end].float().transpose(0, 1) for x in (q, k, v))
        k_HTK, v_HTK = k_HTK.repeat_interleave(H // G, 0), v_HTK.repeat_interleave(H // G, 0)
        score_HTT = q_HTK @ k_HTK.transpose(1, 2) * q.shape[-1] ** -0.5
        position_T = torch.arange(end - start, dtype=torch.int32, device=q.device)
        if causal:
            score_HTT = score_HTT.masked_fill(position_T[:, None] < position_T, -torch.inf)
        weight_HTT = score_HTT.softmax(-1)
        if dropout is not None:
            assert dropout.head_offset is not None
            head_H = torch.arange(H, dtype=torch.int32, device=q.device) + dropout.head_offset
            column_H1T = (head_H * 0x10001)[:, None, None] + position_T
            seeds = dropout.seed0[start:end, None], dropout.seed1[start:end, None]
            weight_HTT = counter_dropout(weight_HTT, dropout.p, seeds, dropout.site, column_H1T)
        outputs.append((weight_HTT @ v_HTK).transpose(0, 1))
    padding = torch.zeros_like(q[bounds[-1] :], dtype=torch.float32)
    return torch.cat([*outputs, padding]).to(q.dtype)


def compare(case: Case) -> None:
    """fp32 must agree within 1e-5, bf16 within 1% in norm (bf16 itself rounds by 0.2% on average)."""
    dtype, tokens = case.qkv.dtype, int(case.cu_seqlens[-1])
    for actual, expected in zip(
        case.run(varlen_attention, dtype), case.run(varlen_attention_reference, torch.float32), strict=True
    ):
        assert actual.dtype == dtype
        assert not actual[tokens:].any()
        if dtype == torch.float32:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        else:
            assert (actual.float() - expected).norm() < 0.01 * expected.norm()


# Sequence lengths include 0, 1 and full blocks; heads are (H, G, K).
FP32_CASES = [
    ((5, 0, 1, 32), (2, 2, 16)),
    ((33, 0, 32), (2, 1, 64)),
    ((16, 0, 17), (2, 1, 96)),
]
BF16_CASES = [
    ((128, 0, 1, 100), (1, 1, 64)),
    ((64, 0, 7), (2, 2, 96)),
    ((100,), (2, 1, 16)),
]
LARGE_BF16_CASES = [((129, 0, 1), (2, 1, 64)), ((160,), (1, 1, 96))]


@each_value(case=FP32_CASES, causal={"causal": True, "full": False}, p=[0.0, 0.1])
def test_fp32(case: tuple[tuple[int, ...], tuple[int, int, int]], causal: bool, p: float) -> None:
    compare(make(*case, causal, p))


@each_value(case=BF16_CASES, causal={"causal": True, "full": False}, p=[0.0, 0.1])
def test_bf16(case: tuple[tuple[int, ...], tuple[int, int, int]], causal: bool, p: float) -> None:
    compare(make(*case, causal, p, dtype=torch.bfloat16))


@pytest.mark.nightly
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("case", LARGE_BF16_CASES)
def test_bf16_with_several_blocks(case: tuple[tuple[int, ...], tuple[int, int, int]], causal: bool, p: float) -> None:
    compare(make(*case, causal, p, dtype=torch.bfloat16))


def test_query_and_key_blocks_divide_each_other() -> None:
    """With a causal mask the masked and unmasked loops meet at the diagonal, which must be a block boundary of both."""
    for max_seqlen, K, bf16, R in itertools.product(
        (64, 128, 512, 2048), (16, 64, 96, 128, 256), (True, False), (1, 4)
    ):
        forward, fused_backward, dq = (
            block_sizes(name, K, R, max_seqlen, bf16) for name in ("forward", "fused_backward", "dq")
        )
        dkdv = block_sizes("dkdv", K, R, max_seqlen, bf16)
        assert all(size.queries % size.keys == 0 for size in (forward, fused_backward, dq))
        assert dkdv.keys % dkdv.queries == 0


@pytest.mark.parametrize(
    ("lengths", "G", "padding"), [((0, 0), 1, 300), ((9, 20), 2, 0), ((9, 20), 2, 200), ((9,), 1, 150)]
)
def test_tokens_after_the_last_sequence_get_zeros(lengths: tuple[int, ...], G: int, padding: int) -> None:
    """Without padding, with more padding than the longest sequence, and with padding only. Unwritten memory is nan
    here."""
    case = make(lengths, (2, G, 16), True, 0.1, padding, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        assert case.qkv.new_empty(1).isnan()
        results = case.run(varlen_attention, torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)
    for x in results:
        assert not x[sum(lengths) :].any()
        assert x.isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(20, 1), pytest.param((40, 1), marks=pytest.mark.nightly)])
def test_scores_far_from_zero(lengths: tuple[int, ...], causal: bool) -> None:
    """All scores of a query are near -250, where exp2(-lse) is inf."""
    case = make(lengths, (2, 2, 16), causal, 0.1, padding=0)
    case.qkv[:, :32] += 20
    case.qkv[:, 32:64] = 0.01 * case.qkv[:, 32:64] - 3
    for x, y in zip(
        case.run(varlen_attention, torch.float32), case.run(varlen_attention_reference, torch.float32), strict=True
    ):
        assert (x - y).norm() < 1e-4 * y.norm()


@pytest.mark.parametrize("causal", [True, False])
def test_dropout_mask_equals_core_attention(causal: bool) -> None:
    B, T, H, K, p = 2, 40, 2, 16, 0.2
    core = CoreAttention(H, H, causal, p, "a site", Axes().tp, Axes().cp).to(DEVICE)
    core.head_offset.fill_(4)
    sample = torch.tensor([[7], [3]], dtype=torch.int32, device=DEVICE)
    key = torch.tensor([11, -13], dtype=torch.int32, device=DEVICE)
    seed0, seed1 = row_seeds(key, sample, torch.arange(T, dtype=torch.int32, device=DEVICE))
    q, k, v = (torch.randn(B, H, T, K, device=DEVICE, requires_grad=True) for _ in range(3))
    dout = torch.randn(B, H, T, K, device=DEVICE)
    y = core(q, k, v, None, RowSeeds(seed0, seed1))
    expected = [y, *torch.autograd.grad(y, (q, k, v), dout)]

    cu_seqlens = torch.arange(B + 1, dtype=torch.int32, device=DEVICE) * T
    rng = DropoutRng(p, seed0.flatten(), seed1.flatten(), core.site, core.head_offset)
    flat_inputs = [x.detach().transpose(1, 2).reshape(B * T, H * K) for x in (q, k, v)]
    qkv = torch.cat(flat_inputs, -1).requires_grad_()
    z = varlen_attention(qkv, H, H, cu_seqlens, T, causal, rng)
    (gradient,) = torch.autograd.grad(z, qkv, dout.transpose(1, 2).reshape(B * T, H, K))
    for x, y in zip([z.flatten(1), *gradient.chunk(3, -1)], expected, strict=True):
        torch.testing.assert_close(x.view(B, T, H, K).transpose(1, 2), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_core_attention_uses_the_kernel(causal: bool) -> None:
    B, T, H, K, p = 2, 20, 2, 16, 0.2
    tokens = torch.arange(T, dtype=torch.int32, device=DEVICE)
    key = torch.tensor([11, -13], dtype=torch.int32, device=DEVICE)
    seeds = row_seeds(key, torch.tensor([[7], [3]], dtype=torch.int32, device=DEVICE), tokens)
    flat = torch.randn(B, T, 3 * H * K, device=DEVICE)
    results = []
    for kernels in (TritonKernels(), Kernels()):
        core = CoreAttention(H, H, causal, p, "a site", Axes().tp, Axes().cp, kernels).to(DEVICE)
        for inputs in ((flat,), flat.chunk(3, -1)):
            results.append(core.forward_qkv(inputs, K, None, seeds))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_dropout_bit(dtype: torch.dtype) -> None:
    """With equal scores and one-hot values, the output shows which weights were dropped."""
    T, H, K, p = 64, 2, 64, 0.3
    rng = make_dropout(T, p)
    assert rng is not None
    cu_seqlens = torch.tensor([0, T], dtype=torch.int32, device=DEVICE)
    zero = torch.zeros(T, H, K, dtype=dtype, device=DEVICE)
    value = torch.eye(T, dtype=dtype, device=DEVICE)[:, None].expand(T, H, K)
    qkv = torch.cat([x.flatten(1) for x in (zero, zero, value)], -1)
    weight = varlen_attention(qkv, H, H, cu_seqlens, T, False, rng)
    head = torch.arange(H, dtype=torch.int32, device=DEVICE)[:, None] + rng.head_offset
    column = head * 0x10001 + torch.arange(T, dtype=torch.int32, device=DEVICE)
    row = rng.seed0[:, None, None], rng.seed1[:, None, None]
    keep = (element_bits(row, rng.site, column) & 0x7FFFFFFF) >= round(p * 2**31)
    assert (weight.ne(0) == keep).all()
    assert abs(keep.float().mean() - (1 - p)) < 0.02
    torch.testing.assert_close(weight[keep].float().mean().item(), 1 / T / (1 - p), rtol=1e-2, atol=0.0)


def test_every_dropout_input_changes_the_result() -> None:
    case = make((5, 12), (2, 2, 16), False, 0.1)
    rng = case.dropout
    assert rng is not None
    baseline = case.run(varlen_attention, torch.float32)
    others = [
        rng._replace(site=rng.site + 1),
        rng._replace(head_offset=rng.head_offset + 1),
        rng._replace(seed0=rng.seed0.roll(1)),
        rng._replace(seed1=rng.seed1.roll(1)),
        rng._replace(p=0.2),
        None,
    ]
    for other in others:
        for x, y in zip(case._replace(dropout=other).run(varlen_attention, torch.float32), baseline, strict=True):
            assert (x - y).norm() > 0.1 * y.norm()


def test_opcheck() -> None:
    """Schema, fake tensors and autograd registration are what torch.compile and autograd assume."""
    case = make((9, 0, 20), (1, 1, 16), True, 0.1)
    qkv = case.qkv.detach().nan_to_num().requires_grad_()
    assert case.dropout is not None
    p, *tensors = case.dropout
    torch.library.opcheck(varlen_attention_forward, (qkv, case.cu_seqlens, *tensors, 1, 1, p, case.max_seqlen, True))
    torch.library.opcheck(
        varlen_attention_forward, (qkv, case.cu_seqlens, *[None] * 4, 1, 1, 0.0, case.max_seqlen, False)
    )


def test_compiled_equals_eager() -> None:
    case = make((9, 20), (2, 2, 16), True, 0.1)
    compiled = torch.compile(varlen_attention, fullgraph=True, backend="aot_eager")
    expected = case.run(varlen_attention, torch.float32)
    for x, y in zip(case.run(compiled, torch.float32), expected, strict=True):
        assert torch.equal(x, y)


@needs_gpu
@pytest.mark.parametrize("lengths", [(64, 0, 7), (33, 100, 1, 128), (300, 129)])
@pytest.mark.parametrize("K", [8, 24, 40, 64, 72, 80, 96, 112, 128, 160])
def test_head_dims(K: int, lengths: tuple[int, ...]) -> None:
    """Triton compiles each head dim differently: some products read past the end of shared memory."""
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

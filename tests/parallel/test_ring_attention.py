"""Context-parallel attention against a dense float64 reference over the full sequence in natural order.

Ranks are threads of this process (`ThreadRing`), except in one test with processes. Shapes as in
parallel/ring_attention.py, with T the tokens of the full sequence.
"""

import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.thread_ring import ThreadRing, run_on_threads
from trainyard import compat
from trainyard.core.counter_rng import DropoutRng, RowSeeds, row_seeds
from trainyard.kernels.reference import PLAIN_SCORES, counter_dropout
from trainyard.models.layers import CoreAttention
from trainyard.parallel import attention_blocks, ring_attention
from trainyard.parallel.axes import Axes
from trainyard.parallel.context_parallel import ContextAxis
from trainyard.parallel.process_group import Group
from trainyard.parallel.ring_attention import AttentionSpec

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
METHODS = ["ring", "all_gather"]
KINDS = ["plain", "documents", "dropout", "documents and dropout"]


class AttentionCase(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool
    documents: Tensor | None = None
    dropout: DropoutRng | None = None
    window: int = 0


def make_documents(batch: int, tokens: int) -> Tensor:
    """Document ids of three kinds of samples: random lengths, one-token documents at both ends, half padding."""
    random = (torch.rand(tokens) < 0.2).cumsum(0)
    short = torch.ones(tokens, dtype=torch.int64)
    short[0], short[-1] = 0, 2
    padded = (torch.arange(tokens) < tokens // 2 + 1).long()
    return torch.stack([random, short, padded])[torch.arange(batch) % 3].int()


def make_case(
    kind: str, causal: bool, device: str = "cpu", dtype: torch.dtype = torch.float32, shape: Any = (3, 4, 2, 24, 8)
) -> AttentionCase:
    B, H, G, T, K = shape
    q, k, v, dout = (torch.randn(B, heads, T, K).to(device, dtype) for heads in (H, G, G, H))
    dropout = None
    if "dropout" in kind:
        key, sample = torch.tensor([7, -3], dtype=torch.int32), torch.arange(5, 5 + B, dtype=torch.int32)
        seeds = row_seeds(key, sample[:, None], torch.arange(T, dtype=torch.int32))
        site, head_offset = (torch.tensor(x, dtype=torch.int32, device=device) for x in (12345, 4))
        dropout = DropoutRng(0.3, seeds.seed0.to(device), seeds.seed1.to(device), site, head_offset)
    documents = make_documents(B, T).to(device) if "documents" in kind else None
    window = int(kind.partition("window ")[2] or 0)
    return AttentionCase(q, k, v, dout, causal, documents, dropout, window)


def dense_attention(case: AttentionCase) -> list[Tensor]:
    """y, dq, dk, dv in float64."""
    q, k, v = (x.double().requires_grad_() for x in (case.q, case.k, case.v))
    repeat, tokens = q.shape[1] // k.shape[1], q.shape[2]
    score = q @ k.repeat_interleave(repeat, 1).transpose(2, 3) / q.shape[3] ** 0.5
    if case.causal:
        score = score.masked_fill(torch.ones(tokens, tokens, device=q.device).triu(1).bool(), -torch.inf)
    if case.window:
        score = score.masked_fill(torch.ones(tokens, tokens, device=q.device).tril(-case.window).bool(), -torch.inf)
    if case.documents is not None:
        score = score.masked_fill((case.documents[:, :, None] != case.documents[:, None])[:, None], -torch.inf)
    weight = score.softmax(-1)
    if case.dropout is not None:
        p, seed0, seed1, site, head_offset = case.dropout
        head = torch.arange(q.shape[1], dtype=torch.int32, device=q.device) + head_offset
        column = head[:, None, None] * 0x10001 + torch.arange(tokens, dtype=torch.int32, device=q.device)
        weight = counter_dropout(weight, p, (seed0[:, None, :, None], seed1[:, None, :, None]), site, column)
    y = weight @ v.repeat_interleave(repeat, 1)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), case.dout.double())]


def positions_by_rank(size: int, tokens: int) -> list[list[int]]:
    """Global positions of the tokens of each rank."""
    if size == 1:
        return [list(range(tokens))]
    chunks = [chunk.tolist() for chunk in torch.arange(tokens).chunk(2 * size)]
    return [chunks[rank] + chunks[-1 - rank] for rank in range(size)]


def local_case(case: AttentionCase, positions: list[int]) -> AttentionCase:
    """The part of a case that the rank with these positions holds."""
    q, k, v, dout = (x[:, :, positions].contiguous() for x in case[:4])
    documents = None if case.documents is None else case.documents[:, positions]
    dropout = case.dropout
    if dropout is not None:
        dropout = dropout._replace(seed0=dropout.seed0[:, positions], seed1=dropout.seed1[:, positions])
    return AttentionCase(q, k, v, dout, case.causal, documents, dropout, case.window)


def parallel_attention(case: AttentionCase, size: int, method: Any) -> list[Tensor]:
    """y, dq, dk, dv computed by `size` threads, in natural order."""
    positions = positions_by_rank(size, case.q.shape[2])

    def work(ring: ThreadRing) -> tuple[Tensor, ...]:
        q, k, v, dout, causal, documents, dropout, window = local_case(case, positions[ring.rank])
        spec = AttentionSpec(method, causal, documents, dropout, window)
        y, lse = ring_attention.forward(ring, q, k, v, spec)
        assert y.dtype == q.dtype
        assert ring.in_flight == 0
        gradients = ring_attention.backward(ring, dout, q, k, v, y, lse, spec)
        assert ring.in_flight == 0
        return y, *gradients

    natural = torch.tensor([position for rank in positions for position in rank], device=case.q.device).argsort()
    return [torch.cat(tensors, 2)[:, :, natural] for tensors in zip(*run_on_threads(size, work), strict=True)]


def assert_close(actual: list[Tensor], expected: list[Tensor], atol: float = 1e-5) -> None:
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=atol, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_dense_attention(size: int, method: str, causal: bool, kind: str, device: str) -> None:
    case = make_case(kind, causal, device)
    assert_close(parallel_attention(case, size, method), dense_attention(case))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["window 1", "window 5", "window 11", "window 23", "documents and dropout, window 7"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sliding_window(size: int, kind: str, method: str) -> None:
    case = make_case(kind, True)
    assert_close(parallel_attention(case, size, method), dense_attention(case))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 1), (6, 2), (3, 3)])
def test_grouped_heads(heads: int, kv_heads: int, method: str) -> None:
    for kind in ("plain", "documents and dropout"):
        case = make_case(kind, True, shape=(2, heads, kv_heads, 16, 4))
        assert_close(parallel_attention(case, 2, method), dense_attention(case))


@pytest.mark.parametrize("tile_bytes", [1, 2000, 5000])
def test_tile_size_does_not_change_the_result(tile_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "TILE_BYTES", tile_bytes)
    for causal, kind in ((True, "documents and dropout"), (False, "documents and dropout"), (True, "window 5")):
        case = make_case(kind, causal)
        assert_close(parallel_attention(case, 2, "ring"), dense_attention(case))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_dropout_masks_equal_those_of_core_attention(size: int, causal: bool) -> None:
    case = make_case("dropout", causal, shape=(2, 4, 4, 16, 8))
    assert case.dropout is not None
    core = CoreAttention(4, 4, causal, case.dropout.p, "a site", Axes().tp, Axes().cp)
    core.head_offset.fill_(4)
    case = case._replace(dropout=case.dropout._replace(site=core.site))
    q, k, v = (x.clone().requires_grad_() for x in case[:3])
    y = core(q, k, v, None, RowSeeds(case.dropout.seed0, case.dropout.seed1))
    expected = [y, *torch.autograd.grad(y, (q, k, v), case.dout)]
    assert_close(parallel_attention(case, size, "ring"), expected)
    assert_close(parallel_attention(case, size, "all_gather"), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["plain", "documents", "documents and dropout"])
@pytest.mark.parametrize("method", METHODS)
def test_bf16(method: str, kind: str, device: str) -> None:
    """Within 1% of float64 in norm (bf16 itself rounds by 0.2% on average)."""
    case = make_case(kind, True, device, torch.bfloat16, (2, 4, 2, 128, 32))
    for x, y in zip(parallel_attention(case, 4, method), dense_attention(case), strict=True):
        assert x.dtype == torch.bfloat16
        assert (x.double() - y).norm() < 0.01 * y.norm()


@needs_cuda
@pytest.mark.parametrize("method", METHODS)
def test_flash_where_torch_prefers_it(method: str) -> None:
    """Some devices and settings make scaled_dot_product_attention prefer flash attention to cuDNN."""
    case = make_case("plain", True, "cuda", torch.bfloat16, (2, 4, 2, 128, 32))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert compat.select_attention_kernel(case.q, case.k, case.v, True, False)
        assert not compat.select_attention_kernel(case.q, case.k, case.v, False, True)
        actual = parallel_attention(case, 4, method)
    for x, y in zip(actual, dense_attention(case), strict=True):
        assert (x.double() - y).norm() < 0.01 * y.norm()


@needs_cuda
def test_cudnn_with_outputs_in_both_memory_orders() -> None:
    """torch takes the plan of an output in one order for one in the other."""
    case = make_case("plain", True, "cuda", torch.bfloat16, (2, 4, 2, 160, 64))
    expected = dense_attention(case)[1:]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        kernel = compat.select_attention_kernel(case.q, case.k, case.v, True, False)
        assert kernel
        out, lse = kernel.forward(case.q, case.k, case.v, True, None, None)
        for y in (out.contiguous(), out.transpose(1, 2).contiguous().transpose(1, 2)):
            gradients = kernel.backward(case.dout, case.q, case.k, case.v, y, lse, True, None, None)
            for x, gradient in zip(gradients, expected, strict=True):
                assert (x.double() - gradient).norm() < 0.01 * gradient.norm()


def trivial_mask(kind: str, queries: int, keys: int, device: str) -> attention_blocks.BlockMask | None:
    """A mask that hides and drops nothing, and selects this kind of kernel."""
    zeros = torch.zeros(2, queries + keys, dtype=torch.int32, device=device)
    seeds = zeros[:, :queries]
    dropout = DropoutRng(0.0, seeds, seeds, zeros[0, 0], zeros[0, 0]) if kind == "unfused" else None
    return None if kind == "fused" else attention_blocks.BlockMask(seeds, zeros[:, :keys], dropout, zeros[0, :keys])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_add_up(dtype: torch.dtype, device: str) -> None:
    """Fused and unfused block kernels agree, and given the output over all keys each block gives its part of the
    gradients."""
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    for trial in range(6):
        T, S, H, K = 3 + 7 * trial, 5 + 4 * trial, 4, 8 * (1 + trial % 3)
        case = make_case("plain", False, device, dtype, (2, H, 2, T, K))
        k, v = (torch.randn(2, 2, S, K).to(device, dtype) for _ in range(2))
        q64, k64, v64 = (x.double().requires_grad_() for x in (case.q, k, v))
        score = q64 @ k64.repeat_interleave(2, 1).transpose(2, 3) * K**-0.5
        y, lse = score.softmax(-1) @ v64.repeat_interleave(2, 1), score.logsumexp(-1).float().detach()
        expected = list(torch.autograd.grad(y, (q64, k64, v64), case.dout.double()))
        cut = 1 + trial % (S - 1)
        for kind in ("fused", "fused with a bias", "unfused"):
            out, out_lse = attention_blocks.forward(case.q, k, v, False, trivial_mask(kind, T, S, device), PLAIN_SCORES)
            assert_close([out, out_lse], [y.detach(), lse], atol)
            gradients = []
            for keys in (slice(0, cut), slice(cut, S)):
                arguments = case.dout, case.q, k[:, :, keys], v[:, :, keys], out.to(dtype), lse
                mask = trivial_mask(kind, T, keys.stop - keys.start, device)
                gradients.append(attention_blocks.backward(*arguments, False, mask, PLAIN_SCORES))
            (dq0, dk0, dv0), (dq1, dk1, dv1) = gradients
            assert_close([dq0.float() + dq1, torch.cat((dk0, dk1), 2), torch.cat((dv0, dv1), 2)], expected, atol)


def test_every_rank_has_the_same_work() -> None:
    def area(block: attention_blocks.AttentionBlock) -> float:
        pairs = (block.queries.stop - block.queries.start) * (block.keys.stop - block.keys.start)
        return pairs / 2 if block.causal else pairs

    for size in (2, 3, 5):
        for step in range(size):
            blocks = [attention_blocks.ring_block((rank - step) % size, rank, 8, True) for rank in range(size)]
            assert len({area(block) for block in blocks}) == 1
        gathered = [attention_blocks.gathered_blocks(rank, size, 8, True) for rank in range(size)]
        assert len({sum(map(area, blocks)) for blocks in gathered}) == 1


def test_exchanges_overlap_with_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    size, case = 4, make_case("plain", True)
    in_flight: dict[str, list[int]] = {"forward": [], "backward": []}
    local = threading.local()

    def recording(name: str) -> Callable[..., Any]:
        kernel = getattr(attention_blocks, name)

        def wrapper(*arguments: Any) -> Any:
            if local.ring.rank == 0:
                in_flight[name].append(local.ring.in_flight)
            return kernel(*arguments)

        return wrapper

    for name in in_flight:
        monkeypatch.setattr(attention_blocks, name, recording(name))

    def work(ring: ThreadRing) -> None:
        local.ring = ring
        q, k, v, dout, *_ = local_case(case, positions_by_rank(size, 24)[ring.rank])
        y, lse = ring_attention.forward(ring, q, k, v, AttentionSpec("ring", True))
        ring_attention.backward(ring, dout, q, k, v, y, lse, AttentionSpec("ring", True))

    run_on_threads(size, work)
    # Forward has the next keys and values in flight; backward, from the second step on, also gradients.
    assert in_flight == {"forward": [1, 1, 1, 0], "backward": [1, 1, 2, 1]}


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("plain", 1 << 13), *(pytest.param(kind, 1 << 15, marks=pytest.mark.nightly) for kind in ("plain", "documents"))],
)
def test_many_tokens_need_no_quadratic_memory(kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2
    case = make_case(kind, True, shape=(1, 1, 1, tokens, 16))
    largest_bias = 0
    make_bias = attention_blocks._bias

    def recording(*arguments: Any) -> Any:
        nonlocal largest_bias
        bias = make_bias(*arguments)
        largest_bias = max(largest_bias, bias.nbytes)
        return bias

    monkeypatch.setattr(attention_blocks, "_bias", recording)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    y, dq, _, _ = parallel_attention(case, size, "ring")
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert growth < 4 * tokens**2 / 4  # a quarter of the fp32 scores
    assert (0 < largest_bias <= attention_blocks.TILE_BYTES) == (kind == "documents")
    rows = [0, 1, 777, tokens // 4 - 1, tokens // 4, tokens // 2, tokens - 1]
    q, k, v, dout = (x[0, 0].double() for x in case[:4])
    hidden = torch.arange(tokens) > torch.tensor(rows)[:, None]
    if case.documents is not None:
        hidden |= case.documents[0] != case.documents[0, rows, None]
    weight = (q[rows] @ k.T / 4).masked_fill(hidden, -torch.inf).softmax(-1)
    assert_close([y[0, 0, rows]], [weight @ v])
    dweight = dout[rows] @ v.T
    assert_close([dq[0, 0, rows]], [(weight * (dweight - (weight * dweight).sum(-1, keepdim=True))) @ k / 4])


def test_fused_kernels_are_selected() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q, k = torch.empty(2, 4, 8, 8, dtype=dtype), torch.empty(2, 2, 8, 8, dtype=dtype)
        assert compat.select_attention_kernel(q, k, k, True, False)
        assert compat.select_attention_kernel(q, k, k, False, True)


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_into_one_graph(kind: str) -> None:
    case = make_case(kind, True)
    attend = ContextAxis().attend
    compiled = torch.compile(lambda q, *rest: attend(q * 2, *rest) + 1, fullgraph=True, backend="aot_eager")
    q, k, v = (x.clone().requires_grad_() for x in case[:3])
    y = compiled(q, k, v, True, case.documents, case.dropout)
    dq, dk, dv = torch.autograd.grad(y, (q, k, v), case.dout)
    assert_close([y - 1, dq / 2, dk, dv], dense_attention(case._replace(q=case.q * 2)))


@pytest.mark.parametrize(
    "kind", ["documents and dropout", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS[:3])]
)
def test_opcheck(kind: str) -> None:
    case = make_case(kind, True)
    q, k, v = (x.clone().requires_grad_() for x in case[:3])
    p, *rng_tensors = case.dropout or (0.0,)
    options = (rng_tensors, p, "", 1, "ring", True, 0, 0, 0.3, 2.0)
    sinks = torch.randn(4)
    torch.library.opcheck(
        ring_attention.context_attention, (q, k, v, case.documents, sinks.clone().requires_grad_(), *options)
    )
    options = (case.documents, sinks, *options)
    y, lse = ring_attention.context_attention(*case[:3], *options)
    torch.library.opcheck(ring_attention.context_attention_backward, (case.dout, *case[:3], y, lse, *options))


def test_any_strides_and_inputs_without_gradient() -> None:
    """Views of one fused tensor, a gradient that is an expanded scalar, keys without gradient, an odd length."""
    case = make_case("plain", True, shape=(2, 4, 4, 9, 8))
    fused = torch.stack(case[:3], 2).permute(0, 3, 2, 1, 4).contiguous().requires_grad_()  # [B, T, 3, H, K]
    q, k, v = fused.unbind(2)
    y = ContextAxis().attend(q.transpose(1, 2), k.detach().transpose(1, 2), v.transpose(1, 2), True, None, None)
    y.sum().backward()
    expected = dense_attention(case._replace(dout=torch.ones_like(case.dout)))
    assert fused.grad is not None
    dq, dk, dv = (x.transpose(1, 2) for x in fused.grad.unbind(2))
    assert_close([y, dq, dv], [expected[0], expected[1], expected[3]])
    assert not dk.any()


def run_rank(rank: int, world_size: int, store: str) -> None:
    """One rank: the sequence over all ranks and then, if there are four, over each of two pairs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    groups = [(dist.group.WORLD, world_size)]
    if world_size == 4:
        groups.append(([dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2], 2))
    cases = [(method, kind, causal) for method in METHODS for kind in KINDS for causal in (True, False)]
    for group, size in groups:
        assert group is not None
        for seed, (method, kind, causal) in enumerate(cases):
            torch.manual_seed(seed)
            case = make_case(kind, causal)
            positions = positions_by_rank(size, case.q.shape[2])[rank % size]
            q, k, v, dout, _, documents, dropout, window = local_case(case, positions)
            inputs = [x.requires_grad_() for x in (q, k, v)]
            axis = ContextAxis(Group(tuple(range(size)), rank % size, group.group_name), method)
            y = axis.attend(*inputs, causal, documents, dropout, window)
            actual = [y, *torch.autograd.grad(y, inputs, dout)]
            assert_close(actual, [x[:, :, positions] for x in dense_attention(case)])
    dist.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, 4])
def test_processes(tmp_path: Path, world_size: int) -> None:
    torch.multiprocessing.spawn(run_rank, (world_size, str(tmp_path / "store")), nprocs=world_size)

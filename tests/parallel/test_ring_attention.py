"""Context parallel attention against a dense reference in float64 over the whole sequence, in natural order.

Ranks are threads of this process (`Threads`), but for one test with true processes. Shapes as in
parallel/ring_attention.py, with T the tokens of the whole sequence.
"""

import queue
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainyard import compat
from trainyard.core.counter_rng import DropoutRng, RowSeeds, row_seeds
from trainyard.kernels.reference import counter_dropout
from trainyard.models.layers import CoreAttention
from trainyard.parallel import attention_blocks, ring_attention
from trainyard.parallel.axes import Axes
from trainyard.parallel.ring_attention import AttentionSpec, attend

WAIT = 60
"""Seconds until a test whose ranks wait for each other fails."""
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
METHODS = ["ring", "all_gather"]
KINDS = ["plain", "documents", "dropout", "documents and dropout"]


class ThreadMailboxes:
    """What the threads of one run share."""

    def __init__(self, size: int) -> None:
        self.boxes: dict[tuple[int, int], queue.Queue[list[Tensor]]] = {}
        self.lock = threading.Lock()
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=WAIT)

    def box(self, rank: int, number: int) -> "queue.Queue[list[Tensor]]":
        with self.lock:
            return self.boxes.setdefault((rank, number), queue.Queue())


class ThreadRing:
    """A `Ring` whose ranks are threads."""

    def __init__(self, mail: ThreadMailboxes, size: int, rank: int) -> None:
        self.mail, self.size, self.rank = mail, size, rank
        self.sent = 0
        self.under_way = 0

    def rotate(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        assert len({x.dtype for x in tensors}) == 1
        self.sent += 1
        number = self.sent
        self.under_way += 1
        self.mail.box((self.rank + 1) % self.size, number).put([x.clone() for x in tensors])

        def arrived() -> list[Tensor]:
            self.under_way -= 1
            return self.mail.box(self.rank, number).get(timeout=WAIT)

        return arrived

    def _everyone(self, x: Tensor) -> list[Tensor]:
        self.mail.slots[self.rank] = x.clone()
        self.mail.barrier.wait()
        found = list(self.mail.slots)
        self.mail.barrier.wait()
        return found

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._everyone(x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return torch.stack([parts[self.rank] for parts in self._everyone(x)]).sum(0)


def on_threads(size: int, work: Callable[[ThreadRing], Any]) -> list[Any]:
    mail = ThreadMailboxes(size)
    with ThreadPoolExecutor(size) as pool:
        return [f.result() for f in [pool.submit(work, ThreadRing(mail, size, rank)) for rank in range(size)]]


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool
    documents: Tensor | None = None
    dropout: DropoutRng | None = None


def documents_of(batch: int, tokens: int) -> Tensor:
    """Packed documents: of random lengths, with one of one token at both ends, and padding after half a sample."""
    random = (torch.rand(tokens) < 0.2).cumsum(0)
    short = torch.ones(tokens, dtype=torch.int64)
    short[0], short[-1] = 0, 2
    padded = (torch.arange(tokens) < tokens // 2 + 1).long()
    return torch.stack([random, short, padded])[torch.arange(batch) % 3].int()


def make(
    kind: str, causal: bool, device: str = "cpu", dtype: torch.dtype = torch.float32, shape: Any = (3, 4, 2, 24, 8)
) -> Case:
    B, H, G, T, K = shape
    q, k, v, dout = (torch.randn(B, heads, T, K).to(device, dtype) for heads in (H, G, G, H))
    dropout = None
    if "dropout" in kind:
        key, sample = torch.tensor([7, -3], dtype=torch.int32), torch.arange(5, 5 + B, dtype=torch.int32)
        words = row_seeds(key, sample[:, None], torch.arange(T, dtype=torch.int32))
        numbers = (torch.tensor(x, dtype=torch.int32, device=device) for x in (12345, 4))
        dropout = DropoutRng(0.3, words[0].to(device), words[1].to(device), *numbers)
    return Case(q, k, v, dout, causal, documents_of(B, T).to(device) if "documents" in kind else None, dropout)


def dense(case: Case) -> list[Tensor]:
    """y, dq, dk, dv in float64."""
    q, k, v = (x.double().requires_grad_() for x in (case.q, case.k, case.v))
    repeat, tokens = q.shape[1] // k.shape[1], q.shape[2]
    score = q @ k.repeat_interleave(repeat, 1).transpose(2, 3) / q.shape[3] ** 0.5
    if case.causal:
        score = score.masked_fill(torch.ones(tokens, tokens, device=q.device).triu(1).bool(), -torch.inf)
    if case.documents is not None:
        score = score.masked_fill((case.documents[:, :, None] != case.documents[:, None])[:, None], -torch.inf)
    weight = score.softmax(-1)
    if case.dropout is not None:
        p, first, second, site, first_head = case.dropout
        head = torch.arange(q.shape[1], dtype=torch.int32, device=q.device) + first_head
        column = head[:, None, None] * 0x10001 + torch.arange(tokens, dtype=torch.int32, device=q.device)
        weight = counter_dropout(weight, p, (first[:, None, :, None], second[:, None, :, None]), site, column)
    y = weight @ v.repeat_interleave(repeat, 1)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), case.dout.double())]


def order(size: int, tokens: int) -> list[list[int]]:
    """Natural places of the tokens of each rank."""
    chunks = [list(part) for part in torch.arange(tokens).chunk(2 * size)] if size > 1 else []
    return [[int(i) for i in chunks[r] + chunks[-1 - r]] for r in range(size)] if size > 1 else [list(range(tokens))]


def local(case: Case, places: list[int]) -> Case:
    """What the rank with these places holds."""
    q, k, v, dout = (x[:, :, places].contiguous() for x in case[:4])
    documents = None if case.documents is None else case.documents[:, places]
    dropout = case.dropout
    if dropout is not None:
        dropout = dropout._replace(seed0=dropout.seed0[:, places], seed1=dropout.seed1[:, places])
    return Case(q, k, v, dout, case.causal, documents, dropout)


def split(case: Case, size: int, method: Any) -> list[Tensor]:
    """y, dq, dk, dv by ranks that are threads, put back in natural order."""
    places = order(size, case.q.shape[2])

    def work(ranks: ThreadRing) -> tuple[Tensor, ...]:
        q, k, v, dout, causal, documents, dropout = local(case, places[ranks.rank])
        rule = AttentionSpec(method, causal, documents, dropout)
        y, lse = ring_attention.forward(ranks, q, k, v, rule)
        assert y.dtype == q.dtype
        assert ranks.under_way == 0
        gradients = ring_attention.backward(ranks, dout, q, k, v, y, lse, rule)
        assert ranks.under_way == 0
        return y, *gradients

    back = torch.tensor([place for part in places for place in part], device=case.q.device).argsort()
    return [torch.cat(parts, 2)[:, :, back] for parts in zip(*on_threads(size, work), strict=True)]


def close(found: list[Tensor], wanted: list[Tensor], atol: float = 1e-5) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=atol, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_dense_attention(size: int, method: str, causal: bool, kind: str, device: str) -> None:
    case = make(kind, causal, device)
    close(split(case, size, method), dense(case))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("heads", "kv"), [(1, 1), (6, 1), (6, 2), (3, 3)])
def test_grouped_heads(heads: int, kv: int, method: str) -> None:
    for kind in ("plain", "documents and dropout"):
        case = make(kind, True, shape=(2, heads, kv, 16, 4))
        close(split(case, 2, method), dense(case))


@pytest.mark.parametrize("tile_bytes", [1, 2000, 5000])
def test_tiles_change_nothing(tile_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "TILE_BYTES", tile_bytes)
    for causal in (True, False):
        case = make("documents and dropout", causal)
        close(split(case, 2, "ring"), dense(case))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_drops_what_core_attention_drops(size: int, causal: bool) -> None:
    case = make("dropout", causal, shape=(2, 4, 4, 16, 8))
    assert case.dropout is not None
    core = CoreAttention(4, 4, causal, case.dropout.p, "a site", Axes().tp, Axes().cp)
    core.head_offset.fill_(4)
    case = case._replace(dropout=case.dropout._replace(site=core.site))
    q, k, v = (x.clone().requires_grad_() for x in case[:3])
    y = core(q, k, v, None, RowSeeds(case.dropout.seed0, case.dropout.seed1))
    wanted = [y, *torch.autograd.grad(y, (q, k, v), case.dout)]
    close(split(case, size, "ring"), wanted)
    close(split(case, size, "all_gather"), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["plain", "documents", "documents and dropout"])
@pytest.mark.parametrize("method", METHODS)
def test_bf16(method: str, kind: str, device: str) -> None:
    """Within 1% of float64 in norm (bf16 itself rounds by 0.2% on average)."""
    case = make(kind, True, device, torch.bfloat16, (2, 4, 2, 128, 32))
    for x, y in zip(split(case, 4, method), dense(case), strict=True):
        assert x.dtype == torch.bfloat16
        assert (x.double() - y).norm() < 0.01 * y.norm()


@needs_cuda
@pytest.mark.parametrize("method", METHODS)
def test_flash_where_torch_prefers_it(method: str) -> None:
    """As on devices, or under settings, where scaled_dot_product_attention would not take cuDNN."""
    case = make("plain", True, "cuda", torch.bfloat16, (2, 4, 2, 128, 32))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert compat.select_attention_kernel(case.q, case.k, True, False)
        assert not compat.select_attention_kernel(case.q, case.k, False, True)
        found = split(case, 4, method)
    for x, y in zip(found, dense(case), strict=True):
        assert (x.double() - y).norm() < 0.01 * y.norm()


def trivial(kind: str, queries: int, keys: int, device: str) -> attention_blocks.BlockMask | None:
    """Pairs that hide and drop nothing, and lead to this kind of kernel."""
    one = torch.zeros(2, queries + keys, dtype=torch.int32, device=device)
    dropout = DropoutRng(0.0, one[:, :queries], one[:, :queries], one[0, 0], one[0, 0]) if kind == "plain" else None
    return (
        None if kind == "fused" else attention_blocks.BlockMask(one[:, :queries], one[:, :keys], dropout, one[0, :keys])
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_add_up(dtype: torch.dtype, device: str) -> None:
    """Fused and plain block kernels agree, and given the whole output each gives its keys' part of the gradients."""
    band = 1e-5 if dtype == torch.float32 else 2e-2
    for trial in range(6):
        T, S, H, K = 3 + 7 * trial, 5 + 4 * trial, 4, 8 * (1 + trial % 3)
        case = make("plain", False, device, dtype, (2, H, 2, T, K))
        k, v = (torch.randn(2, 2, S, K).to(device, dtype) for _ in range(2))
        q64, k64, v64 = (x.double().requires_grad_() for x in (case.q, k, v))
        score = q64 @ k64.repeat_interleave(2, 1).transpose(2, 3) * K**-0.5
        y, lse = score.softmax(-1) @ v64.repeat_interleave(2, 1), score.logsumexp(-1).float().detach()
        wanted = list(torch.autograd.grad(y, (q64, k64, v64), case.dout.double()))
        cut = 1 + trial % (S - 1)
        for kind in ("fused", "fused with a bias", "plain"):
            out, found = attention_blocks.forward(case.q, k, v, False, trivial(kind, T, S, device))
            close([out, found], [y.detach(), lse], band)
            parts = []
            for keys in (slice(0, cut), slice(cut, S)):
                arguments = case.dout, case.q, k[:, :, keys], v[:, :, keys], out.to(dtype), lse
                parts.append(
                    attention_blocks.backward(*arguments, False, trivial(kind, T, keys.stop - keys.start, device))
                )
            (dq0, dk0, dv0), (dq1, dk1, dv1) = parts
            close([dq0.float() + dq1, torch.cat((dk0, dk1), 2), torch.cat((dv0, dv1), 2)], wanted, band)


def test_every_rank_has_the_same_work() -> None:
    def area(block: attention_blocks.AttentionBlock) -> float:
        whole = (block.queries.stop - block.queries.start) * (block.keys.stop - block.keys.start)
        return whole / 2 if block.causal else whole

    for size in (2, 3, 5):
        for step in range(size):
            assert (
                len({area(attention_blocks.ring_block((rank - step) % size, rank, 8, True)) for rank in range(size)})
                == 1
            )
        assert len({sum(map(area, attention_blocks.gathered_blocks(rank, size, 8, True))) for rank in range(size)}) == 1


def test_exchanges_are_under_way_while_blocks_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    size, case = 4, make("plain", True)
    under_way: dict[str, list[int]] = {"forward": [], "backward": []}
    here = threading.local()

    def noting(name: str) -> Callable[..., Any]:
        kernel = getattr(attention_blocks, name)

        def noted(*arguments: Any) -> Any:
            if here.ranks.rank == 0:
                under_way[name].append(here.ranks.under_way)
            return kernel(*arguments)

        return noted

    for name in under_way:
        monkeypatch.setattr(attention_blocks, name, noting(name))

    def work(ranks: ThreadRing) -> None:
        here.ranks = ranks
        q, k, v, dout, *_ = local(case, order(size, 24)[ranks.rank])
        y, lse = ring_attention.forward(ranks, q, k, v, AttentionSpec("ring", True))
        ring_attention.backward(ranks, dout, q, k, v, y, lse, AttentionSpec("ring", True))

    on_threads(size, work)
    # The next keys and values in the forward pass; backward also, from the second step on, gradients on their way home.
    assert under_way == {"forward": [1, 1, 1, 0], "backward": [1, 1, 2, 1]}


@pytest.mark.parametrize("kind", ["plain", "documents"])
def test_32k_tokens_without_their_square(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, size = 1 << 15, 2
    case = make(kind, True, shape=(1, 1, 1, tokens, 16))
    largest = 0
    bias = attention_blocks._bias

    def noted(*arguments: Any) -> Any:
        nonlocal largest
        result = bias(*arguments)
        largest = max(largest, result.nbytes)
        return result

    monkeypatch.setattr(attention_blocks, "_bias", noted)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    y, dq, _, _ = split(case, size, "ring")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 4 * tokens**2 / 4  # the square of tokens in fp32, and far less than that
    assert (0 < largest <= attention_blocks.TILE_BYTES) == (kind == "documents")
    rows = [0, 1, 777, tokens // 4 - 1, tokens // 4, tokens // 2, tokens - 1]
    q, k, v, dout = (x[0, 0].double() for x in case[:4])
    hidden = torch.arange(tokens) > torch.tensor(rows)[:, None]
    if case.documents is not None:
        hidden |= case.documents[0] != case.documents[0, rows, None]
    weight = (q[rows] @ k.T / 4).masked_fill(hidden, -torch.inf).softmax(-1)
    close([y[0, 0, rows]], [weight @ v])
    dweight = dout[rows] @ v.T
    close([dq[0, 0, rows]], [(weight * (dweight - (weight * dweight).sum(-1, keepdim=True))) @ k / 4])


def alone(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, dropout: DropoutRng | None, causal: bool
) -> Tensor:
    return attend(q, k, v, group="", size=1, method="ring", causal=causal, documents_BT=documents, dropout=dropout)


def test_fused_kernels_are_found() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q, k = torch.empty(2, 4, 8, 8, dtype=dtype), torch.empty(2, 2, 8, 8, dtype=dtype)
        assert compat.select_attention_kernel(q, k, True, False)
        assert compat.select_attention_kernel(q, k, False, True)


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_into_one_graph(kind: str) -> None:
    case = make(kind, True)
    compiled = torch.compile(lambda q, *rest: alone(q * 2, *rest) + 1, fullgraph=True, backend="aot_eager")
    q, k, v = (x.clone().requires_grad_() for x in case[:3])
    y = compiled(q, k, v, case.documents, case.dropout, True)
    dq, dk, dv = torch.autograd.grad(y, (q, k, v), case.dout)
    close([y - 1, dq / 2, dk, dv], dense(case._replace(q=case.q * 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_is_a_proper_operator(kind: str) -> None:
    case = make(kind, True)
    q, k, v = (x.clone().requires_grad_() for x in case[:3])
    p, *words = case.dropout or (0.0,)
    rest = (case.documents, words, p, "", 1, "ring", True)
    torch.library.opcheck(ring_attention.context_attention, (q, k, v, *rest))
    y, lse = ring_attention.context_attention(q.detach(), k.detach(), v.detach(), *rest)
    torch.library.opcheck(ring_attention.context_attention_backward, (case.dout, *case[:3], y, lse, *rest))


def test_takes_any_strides_and_needs_no_gradient_of_all() -> None:
    """Views of one fused matrix, a gradient that is an expanded scalar, keys that need none, an odd length."""
    case = make("plain", True, shape=(2, 4, 4, 9, 8))
    fused = torch.stack(case[:3], 2).permute(0, 3, 2, 1, 4).contiguous().requires_grad_()  # [B, T, 3, H, K]
    q, k, v = fused.unbind(2)
    y = alone(q.transpose(1, 2), k.detach().transpose(1, 2), v.transpose(1, 2), None, None, True)
    y.sum().backward()
    wanted = dense(case._replace(dout=torch.ones_like(case.dout)))
    assert fused.grad is not None
    dq, dk, dv = (x.transpose(1, 2) for x in fused.grad.unbind(2))
    close([y, dq, dv], [wanted[0], wanted[1], wanted[3]])
    assert not dk.any()


def process(rank: int, world: int, meeting: str) -> None:
    """One of four true ranks: the sequence over all four, then over each of two pairs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for group, size in ((dist.group.WORLD, 4), (pairs[rank // 2], 2)):
        assert group is not None
        here = rank % size
        for number, (method, kind, causal) in enumerate(
            (method, kind, causal) for method in METHODS for kind in KINDS for causal in (True, False)
        ):
            torch.manual_seed(number)
            case = make(kind, causal)
            places = order(size, case.q.shape[2])[here]
            q, k, v, dout, _, documents, dropout = local(case, places)
            inputs = [x.requires_grad_() for x in (q, k, v)]
            y = attend(
                *inputs,
                group=group.group_name,
                size=size,
                method=method,
                causal=causal,
                documents_BT=documents,
                dropout=dropout,
            )
            found = [y, *torch.autograd.grad(y, inputs, dout)]
            close(found, [x[:, :, places] for x in dense(case)])
    dist.destroy_process_group()


def test_true_processes(tmp_path: Any) -> None:
    torch.multiprocessing.spawn(process, (4, str(tmp_path / "meeting")), nprocs=4)

"""Scale, soft-cap and sinks of attention scores, and values of another width than keys: every way to compute attention
against the plain definition in float64, and against transformers' Gemma 2 and gpt-oss."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from tests.parallel.test_ring_attention import make_documents, positions_by_rank
from tests.support.thread_ring import ThreadRing, run_on_threads
from trainyard.core.counter_rng import DropoutRng, RowSeeds, row_seeds
from trainyard.kernels.batch_invariant import BatchInvariantKernels
from trainyard.kernels.cpu_decode import CpuDecodeKernels
from trainyard.kernels.reference import AttentionScores, Kernels, counter_dropout
from trainyard.models.layers import CoreAttention
from trainyard.parallel import attention_blocks, ring_attention
from trainyard.parallel.context_parallel import ContextAxis
from trainyard.parallel.process_group import Group
from trainyard.parallel.ring_attention import AttentionSpec
from trainyard.parallel.tensor_parallel import TensorAxis

OPTIONS = {
    "scale": {"scale": 0.7},
    "soft-cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "values": {"value_size": 5},
    "wide values": {"value_size": 12},
    "all": {"scale": 0.7, "soft_cap": 1.5, "sinks": True, "value_size": 5},
    "all but the cap": {"scale": 0.7, "sinks": True, "value_size": 5},
}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "all keys": {"causal": False},
    "window": {"window": 7},
    "documents": {"documents": True},
    "documents and window": {"documents": True, "window": 5},
    "dropout": {"p": 0.3},
    "all": {"documents": True, "window": 5, "p": 0.3},
}


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    scores: AttentionScores
    causal: bool
    window: int | None
    documents: Tensor | None
    p: float
    seeds: RowSeeds

    def module(self, **options: Any) -> CoreAttention:
        scale, soft_cap, sinks = self.scores
        parameter = None if sinks is None else nn.Parameter(sinks.clone())
        arguments = (self.q.shape[1], self.k.shape[1], self.causal, self.p, "a site", TensorAxis())
        axis, kernels = options.get("cp", ContextAxis()), options.get("kernels")
        return CoreAttention(*arguments, axis, kernels, self.window, scale, soft_cap, parameter)


def make_case(options: str, mask: str, heads: tuple[int, int] = (4, 2), tokens: int = 24, width: int = 1) -> Case:
    """`width`: multiple of 8 of a head's width."""
    torch.manual_seed(3)
    o, m = OPTIONS[options], {"causal": True, "window": None, "documents": False, "p": 0.0} | MASKS[mask]
    (H, G), K, V = heads, 8 * width, o.get("value_size", 8) * width
    q, k, v, dout = (torch.randn(3, n, tokens, size) for n, size in ((H, K), (G, K), (G, V), (H, V)))
    sinks = torch.randn(H) if o.get("sinks") else None
    scores = AttentionScores(o.get("scale"), o.get("soft_cap"), sinks)
    documents = make_documents(3, tokens) if m["documents"] else None
    key, sample = torch.tensor([7, -3], dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    seeds = row_seeds(key, sample[:, None], torch.arange(tokens, dtype=torch.int32))
    return Case(q, k, v, dout, scores, m["causal"], m["window"], documents, m["p"], seeds)


def definition(case: Case, site: Tensor) -> list[Tensor]:
    """Output and gradients of q, k, v and sinks in float64. A sink is a key with the value 0."""
    q, k, v = (x.double().requires_grad_() for x in case[:3])
    (B, H, T, K), repeat = q.shape, q.shape[1] // k.shape[1]
    score = q @ k.repeat_interleave(repeat, 1).transpose(2, 3)
    score = score / K**0.5 if case.scores.scale is None else score * case.scores.scale
    if case.scores.soft_cap is not None:
        score = case.scores.soft_cap * torch.tanh(score / case.scores.soft_cap)
    hidden = torch.zeros(1, 1, T, T, dtype=torch.bool)
    if case.causal:
        hidden = hidden | torch.ones(T, T, dtype=torch.bool).triu(1)
    if case.window:
        hidden = hidden | torch.ones(T, T, dtype=torch.bool).tril(-case.window)
    if case.documents is not None:
        hidden = hidden | (case.documents[:, :, None] != case.documents[:, None])[:, None]
    score = score.masked_fill(hidden, -torch.inf)
    inputs = [q, k, v]
    if case.scores.sinks is not None:
        inputs.append(case.scores.sinks.double().requires_grad_())
        score = torch.cat((score, inputs[3].view(1, H, 1, 1).expand(B, H, T, 1)), -1)
    weight = score.softmax(-1)[..., :T]
    if case.p:
        column = torch.arange(H, dtype=torch.int32)[:, None, None] * 0x10001 + torch.arange(T, dtype=torch.int32)
        seeds = (case.seeds.seed0[:, None, :, None], case.seeds.seed1[:, None, :, None])
        weight = counter_dropout(weight, case.p, seeds, site, column)
    y = weight @ v.repeat_interleave(repeat, 1)
    return [y.detach(), *torch.autograd.grad(y, inputs, case.dout.double())]


def computed(case: Case, core: CoreAttention) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in case[:3])
    y = core(q, k, v, case.documents, case.seeds)
    inputs = [q, k, v] if core.sinks is None else [q, k, v, core.sinks]
    return [y.detach(), *torch.autograd.grad(y, inputs, case.dout)]


def assert_close(actual: list[Tensor], expected: list[Tensor], atol: float = 1e-5) -> None:
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=atol, rtol=1e-5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_core_attention_equals_the_definition(options: str, mask: str) -> None:
    """By blocks, and in the plain operators of devices whose compiler wants those."""
    case = make_case(options, mask)
    expected = definition(case, case.module().site)
    assert_close(computed(case, case.module()), expected)
    assert_close(computed(case, case.module(cp=ContextAxis(decomposes_attention=True))), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_on_a_gpu(options: str, mask: str, dtype: torch.dtype) -> None:
    case = make_case(options, mask, tokens=160, width=8)
    case = case._replace(scores=case.scores._replace(scale=case.scores.scale and 0.2))
    expected = definition(case, case.module().site)
    scores = case.scores._replace(sinks=None if case.scores.sinks is None else case.scores.sinks.cuda())
    moved = {name: getattr(case, name).cuda().to(dtype) for name in ("q", "k", "v", "dout")}
    seeds = RowSeeds(*(x.cuda() for x in case.seeds))
    documents = None if case.documents is None else case.documents.cuda()
    moved_case = case._replace(**moved, scores=scores, seeds=seeds, documents=documents)
    axis = ContextAxis()
    axis.max_documents = 3 * 160
    for x, y in zip(computed(moved_case, case.module(cp=axis).cuda()), expected, strict=True):
        assert (x.cpu().double() - y).norm() < (1e-5 if dtype == torch.float32 else 0.01) * y.norm()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, the test above runs it")
@pytest.mark.parametrize("window", [0, 7, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_kernel_of_soft_caps_equals_the_definition(window: int) -> None:
    """In Triton's interpreter, in sequences of several blocks, with sinks."""
    from trainyard.kernels.triton.attention.ops import capped_attention, capped_attention_backward

    case = make_case("all", "causal", (2, 1), tokens=40)._replace(window=window or None)
    q, k, dout = (x[:1] for x in (case.q, case.k, torch.randn(1, 2, 40, 8)))
    case = case._replace(q=q, k=k, v=torch.randn(1, 1, 40, 8), dout=dout)
    q, k, v, dout = (x.transpose(1, 2).flatten(0, 1) for x in case[:4])
    starts = torch.tensor([0, 40], dtype=torch.int32)
    out, lse = capped_attention(q, k, v, starts, 40, window, case.scores)
    attention_blocks.add_sinks(out.transpose(0, 1)[None], lse[None], case.scores)
    gradients = capped_attention_backward(dout, q, k, v, out, lse, starts, 40, window, case.scores)
    *expected, _ = definition(case, case.module().site)
    assert_close([out, *gradients], [x.transpose(1, 2).flatten(0, 1) for x in expected])


@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (6, 6)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    case = make_case("all", "window", heads)
    assert_close(computed(case, case.module()), definition(case, case.module().site))


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", ["soft-cap", "sinks", "values", "all"])
def test_context_parallel_ranks_equal_the_definition(options: str, mask: str, method: Any) -> None:
    case, size = make_case(options, mask), 2
    site = case.module().site
    positions = positions_by_rank(size, case.q.shape[2])

    def work(ring: ThreadRing) -> tuple[Tensor, ...]:
        here = positions[ring.rank]
        q, k, v, dout = (x[:, :, here].contiguous() for x in case[:4])
        documents = None if case.documents is None else case.documents[:, here]
        seeds = case.seeds.seed0[:, here], case.seeds.seed1[:, here]
        dropout = DropoutRng(case.p, *seeds, site, torch.tensor(0, dtype=torch.int32)) if case.p else None
        spec = AttentionSpec(method, case.causal, documents, dropout, case.window or 0, case.scores)
        y, lse = ring_attention.forward(ring, q, k, v, spec)
        gradients = ring_attention.backward(ring, dout, q, k, v, y, lse, spec)
        return y, *gradients, attention_blocks.sink_gradient(dout, y, lse, case.scores)

    natural = torch.tensor(list(itertools.chain(*positions))).argsort()
    *parts, sinks = zip(*run_on_threads(size, work), strict=True)
    actual = [torch.cat(tensors, 2)[:, :, natural] for tensors in parts]
    if case.scores.sinks is not None:
        actual.append(sum(sinks))  # as the ranks' gradients are summed
    assert_close(actual, definition(case, site))


def test_tensor_parallel_ranks_have_their_own_sinks() -> None:
    case = make_case("all", "causal")
    full, *_ = definition(case, case.module().site)
    assert case.scores.sinks is not None
    sinks = nn.Parameter(case.scores.sinks[2:])
    scale, soft_cap, _ = case.scores
    axis = TensorAxis(Group((0, 1), 1))
    core = CoreAttention(4, 2, True, 0.0, "s", axis, ContextAxis(), None, None, scale, soft_cap, sinks)
    assert_close([core(case.q[:, 2:], case.k[:, 1:], case.v[:, 1:])], [full[:, 2:]])


@pytest.mark.parametrize("mask", ["causal", "window", "documents and window"])
@pytest.mark.parametrize("options", OPTIONS)
def test_batch_invariant_kernels_equal_the_definition(options: str, mask: str) -> None:
    case = make_case(options, mask)
    core = case.module(kernels=BatchInvariantKernels())
    assert_close(computed(case, core), definition(case, core.site))


def test_bf16_rounds_the_output_once() -> None:
    case = make_case("all", "documents and window")
    case = case._replace(**{name: getattr(case, name).bfloat16() for name in ("q", "k", "v", "dout")})
    for x, y in zip(computed(case, case.module()), definition(case, case.module().site), strict=True):
        assert (x.double() - y).norm() < 0.01 * y.norm()


@pytest.mark.parametrize("window", [None, 7])
def test_soft_cap_equals_gemma2(window: int | None) -> None:
    case = make_case("soft-cap", "causal")._replace(window=window)
    case = case._replace(scores=AttentionScores(0.3, 1.5))
    module = nn.Module()
    module.num_key_value_groups = 2
    inputs = [x.clone().requires_grad_() for x in case[:3]]
    mask = torch.full((24, 24), -torch.inf).triu(1) + torch.full((24, 24), -torch.inf).tril(-(window or 24))
    y, _ = gemma2_attention(module, *inputs, mask.nan_to_num(neginf=-torch.inf)[None, None], scaling=0.3, softcap=1.5)
    expected = [y.transpose(1, 2), *torch.autograd.grad(y, inputs, case.dout.transpose(1, 2))]
    assert_close(computed(case, case.module()), expected)


@pytest.mark.parametrize("window", [None, 7])
def test_sinks_equal_gpt_oss(window: int | None) -> None:
    case = make_case("sinks", "causal")._replace(window=window)
    module = nn.Module()
    module.num_key_value_groups = 2
    assert case.scores.sinks is not None
    module.sinks = nn.Parameter(case.scores.sinks.clone())
    inputs = [x.clone().requires_grad_() for x in case[:3]]
    mask = torch.full((24, 24), -torch.inf).triu(1) + torch.full((24, 24), -torch.inf).tril(-(window or 24))
    y, _ = gpt_oss_attention(module, *inputs, mask[None, None], scaling=8**-0.5)
    gradients = torch.autograd.grad(y, [*inputs, module.sinks], case.dout.transpose(1, 2))
    assert_close(computed(case, case.module()), [y.transpose(1, 2), *gradients])


@pytest.mark.parametrize("options", OPTIONS)
def test_compiles_into_one_graph(options: str) -> None:
    case = make_case(options, "documents")
    core = case.module()
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager")
    assert_close(computed(case, compiled), computed(case, core))


@pytest.mark.parametrize("decoding", [Kernels(), CpuDecodeKernels(), BatchInvariantKernels()])
@pytest.mark.parametrize(("window", "size"), [(None, 24), (7, 24), (7, 7)])
@pytest.mark.parametrize("options", OPTIONS)
def test_decoding_equals_full_attention(options: str, window: int | None, size: int, decoding: Kernels) -> None:
    """A token over a cache, with slots of different lengths; a cache as long as the window is a ring."""
    if decoding.is_batch_invariant and size == window:
        pytest.skip("these have no rings")
    case = make_case(options, "causal")._replace(window=window)
    expected, *_ = definition(case, case.module().site)
    lengths, T = torch.tensor([5, 17, 23], dtype=torch.int32), case.q.shape[2]
    unwritten = torch.nan if decoding.is_batch_invariant else 0.0
    caches = [torch.full_like(x[:, :, :size], unwritten) for x in case[1:3]]
    for slot, length in enumerate(lengths.tolist()):
        for cache, x in zip(caches, (case.k, case.v), strict=True):
            for token in range(length):
                cache[slot, :, token % size] = x[slot, :, token]
    index = torch.arange(3)
    q, k, v = (x[index, :, lengths.long()][:, :, None] for x in case[:3])
    y = decoding.decode_attention(q, k, v, *caches, lengths, T, window, case.scores)
    assert_close([y], [expected[index, :, lengths.long()][:, :, None]])

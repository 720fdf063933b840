"""Each Triton kernel against the reference in plain torch: in Triton's interpreter on a CPU, compiled on a GPU."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.pairwise import each_value, pairwise
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.counter_rng import DropoutRng, key32, row_seeds
from trainyard.kernels.reference import Kernels
from trainyard.kernels.triton import rms_norm
from trainyard.kernels.triton.column_sums import add_column_sums_, split_rows
from trainyard.kernels.triton.ops import TritonKernels
from trainyard.models.output import ModelOutput
from trainyard.train.cross_entropy import torch_chunk_loss
from trainyard.train.optim.gradient_sync import accumulate_into
from trainyard.train.optim.updates.adamw import adamw_, adamw_stochastic_rounding_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (actual.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-20)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert error < TOLERANCE[dtype], error


def compare(function: str, dtype: torch.dtype, tensors: list[Tensor], *rest: object) -> None:
    """Compare outputs and all gradients of the fused kernel and of the fp32 reference."""
    actual = [x.clone().requires_grad_() for x in tensors]
    expected = [x.float().requires_grad_() for x in tensors]
    out, reference = getattr(TritonKernels(), function)(*actual, *rest), getattr(Kernels(), function)(*expected, *rest)
    out, reference = (x if isinstance(x, tuple) else (x,) for x in (out, reference))
    weights = [random(*y.shape, dtype=dtype, seed=7 + number) for number, y in enumerate(reference)]
    torch.autograd.backward(out, weights)
    torch.autograd.backward(reference, [w.float() for w in weights])
    for x, y in zip(out, reference, strict=True):
        close(x.detach(), y.detach().to(dtype), dtype)
    for x, y in zip(actual, expected, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        close(x.grad, y.grad.to(dtype), dtype)


def make_dropout(p: float) -> DropoutRng | None:
    """Dropout for rows [2, 7]."""
    key, site = (torch.tensor(key32(label), dtype=torch.int32, device=DEVICE) for label in ("key", "site"))
    row = torch.arange(14, dtype=torch.int32, device=DEVICE).view(2, 7)
    return DropoutRng(p, *row_seeds(key, row, row * 3), site[0]) if p else None


@pairwise(dtype=DTYPES, columns=[64, 96])
def test_swiglu(dtype: torch.dtype, columns: int) -> None:
    compare("swiglu", dtype, [random(3, 5, 2 * columns, dtype=dtype)])


@pairwise(dtype=DTYPES, tanh={"exact": False, "tanh": True})
def test_gelu(dtype: torch.dtype, tanh: bool) -> None:
    x = 3 * random(3, 5, 80, dtype=dtype)
    x[0, 0, :5] = torch.tensor([0.0, 30.0, -30.0, 1e-4, -1e-4])
    compare("bias_gelu", dtype, [x, 0.1 * random(80, dtype=dtype)], tanh)


@pytest.mark.parametrize(("rows", "columns"), [(4, 600), (70, 16)])
def test_gelu_of_several_tiles(rows: int, columns: int) -> None:
    compare("bias_gelu", torch.float32, [random(rows, columns), random(columns)], False)


def test_backward_unpacks_saved_tensors_once() -> None:
    """Under activation recomputation torch recomputes saved tensors for one reader only."""
    kernels = TritonKernels()
    x, y, vectors = random(2, 7, 80), random(2, 7, 80, seed=1), [random(80, seed=seed) for seed in (2, 3, 4, 5)]

    def block(x: Tensor, scale: Tensor, bias: Tensor, y_bias: Tensor, gelu_bias: Tensor) -> Tensor:
        total, out = kernels.add_layer_norm(x, y, y_bias, scale, bias, 1e-5, make_dropout(0.2))
        return kernels.add_dropout(total, kernels.bias_gelu(out, gelu_bias, True), bias, make_dropout(0.1))

    results = []
    for recomputed in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, *vectors)]
        out = checkpoint(block, *leaves, use_reentrant=False) if recomputed else block(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_swiglu_wider_than_a_block() -> None:
    compare("swiglu", torch.float32, [random(2, 2 * 1500)])


@pairwise(dtype=DTYPES, added={"x": False, "x+y": True}, columns=[32, 80])
def test_rms_norm(dtype: torch.dtype, added: bool, columns: int) -> None:
    x, y = (random(2, 7, columns, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = 1 + 0.1 * random(columns, dtype=dtype)

    def run(kernels: Kernels, *tensors: Tensor) -> list[Tensor]:
        a, b, scale = (t.clone().requires_grad_() for t in tensors)
        total, out = kernels.add_rms_norm(a, b if added else None, scale, 1e-5)
        # The residual has other uses in the block, so its gradient arrives too.
        (total * random(*total.shape, seed=3).to(total) + out * random(*out.shape, seed=4).to(out)).sum().backward()
        grads = [t.grad for t in ((a, b, scale) if added else (a, scale))]
        return [total.detach(), out.detach(), *(g for g in grads if g is not None)]

    actual, expected = run(TritonKernels(), x, y, weight), run(Kernels(), x.float(), y.float(), weight.float())
    assert len(actual) == len(expected) == 4 + added
    for ours, theirs in zip(actual, expected, strict=True):
        close(ours, theirs.to(dtype), dtype)


OUTPUTS = [("both", False), ("both", True), ("normed", False), ("normed", True), ("residual", True)]
"""Outputs that the block uses, and post_norm. (Without post_norm, every block uses the norm.)"""


@each_value(dtype=DTYPES, added=["nothing", "y", "y and bias"], p=[0.0, 0.2], outputs=OUTPUTS)
def test_layer_norm(dtype: torch.dtype, added: str, p: float, outputs: tuple[str, bool]) -> None:
    """With dropout, a residual and the bias of the preceding projection."""
    (used_output, post_norm), columns = outputs, 80
    x, y = (random(2, 7, columns, dtype=dtype, seed=seed) for seed in (1, 2))
    vectors = [1 + 0.1 * random(columns, dtype=dtype, seed=seed) for seed in (3, 4, 5)]
    rng = make_dropout(p)

    def run(kernels: Kernels, *tensors: Tensor) -> list[Tensor]:
        a, b, weight, bias, y_bias = (t.clone().requires_grad_() for t in tensors)
        addend = (None, None, None)
        if added != "nothing":
            addend = (b, y_bias if added == "y and bias" else None, rng)
        total, out = kernels.add_layer_norm(a, *addend[:2], weight, bias, 1e-5, addend[2], post_norm)
        used = {"both": (total, out), "normed": (out,), "residual": (total,)}[used_output]
        torch.autograd.backward(used, [random(*x.shape, seed=seed).to(x.dtype) for seed, x in enumerate(used)])
        return [total.detach(), out.detach(), *(t.grad for t in (a, b, weight, bias, y_bias) if t.grad is not None)]

    actual = run(TritonKernels(), x, y, *vectors)
    expected = run(Kernels(), x.float(), y.float(), *(v.float() for v in vectors))
    assert len(actual) == len(expected) == {"nothing": 5, "y": 6, "y and bias": 7}[added]
    for ours, theirs in zip(actual, expected, strict=True):
        close(ours, theirs.to(dtype), dtype)


@pairwise(dtype=DTYPES, added={"y": False, "x+y": True}, has_bias={"no-bias": False, "bias": True}, p=[0.0, 0.2])
def test_dropout(dtype: torch.dtype, added: bool, has_bias: bool, p: float) -> None:
    x, y, bias = random(2, 7, 80, dtype=dtype), random(2, 7, 80, dtype=dtype, seed=1), random(80, dtype=dtype)
    rng = make_dropout(p)

    def run(kernels: Kernels, *tensors: Tensor) -> list[Tensor]:
        a, b, c = (t.clone().requires_grad_() for t in tensors)
        out = kernels.add_dropout(a if added else None, b, c if has_bias else None, rng)
        out.backward(random(2, 7, 80, seed=3).to(out))
        return [out.detach(), *(t.grad for t in (a, b, c) if t.grad is not None)]

    actual, expected = run(TritonKernels(), x, y, bias), run(Kernels(), x.float(), y.float(), bias.float())
    assert len(actual) == len(expected) == 2 + added + has_bias
    for ours, theirs in zip(actual, expected, strict=True):
        close(ours, theirs.to(dtype), dtype)


@pytest.mark.parametrize(("rows", "programs"), [(50, 8), pytest.param(1500, 2112, marks=pytest.mark.nightly)])
def test_weight_gradient_of_rms_norm_sums_over_many_rows(
    rows: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several rows per program, and with as many programs as on a GPU."""
    monkeypatch.setattr(rms_norm, "split_rows", partial(split_rows, programs=programs))
    x, weight = random(rows, 8), random(8)
    grads = []
    for kernels in (TritonKernels(), Kernels()):
        w = weight.clone().requires_grad_()
        kernels.add_rms_norm(x, None, w, 1e-5)[1].square().sum().backward()
        assert w.grad is not None
        grads.append(w.grad)
    close(grads[0], grads[1], torch.float32)


ROPE_CASES = {
    "dtype": DTYPES,
    "shape": [(4, 4, 16, 16), (6, 2, 24, 24), (3, 1, 8, 8), (4, 2, 24, 10)],
    "per_sample": {"shared": False, "per-sample": True},
    "interleaved": {"halves": False, "pairs": True},
}
"""`shape` is heads, kv heads, head dim and how many of its dims rotate; positions are shared or differ between
samples."""


def rope_table(size: int, per_sample: bool, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Cosines and sines with a factor."""
    angle = random(2, 1, 5, size // 2) if per_sample else random(5, size // 2)
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    return 1.1 * angle.cos(), 1.1 * angle.sin()


@each_value(**ROPE_CASES)
def test_rope(dtype: torch.dtype, shape: tuple[int, int, int, int], per_sample: bool, interleaved: bool) -> None:
    heads, kv_heads, head_dim, size = shape
    qkv = random(2, 5, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    compare("rope", dtype, [qkv], *rope_table(size, per_sample, interleaved), heads, kv_heads, interleaved)


@each_value(**ROPE_CASES)
def test_norm_rope(dtype: torch.dtype, shape: tuple[int, int, int, int], per_sample: bool, interleaved: bool) -> None:
    heads, kv_heads, head_dim, size = shape
    qkv = 3 * random(2, 5, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    weights = [1 + 0.2 * random(head_dim, dtype=dtype, seed=seed) for seed in (1, 2)]
    table = rope_table(size, per_sample, interleaved)
    compare("norm_rope", dtype, [qkv, *weights], 1e-6, *table, heads, kv_heads, interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rope_in_pairs(interleaved: bool) -> None:
    """Both at once, which the cases above may not have."""
    rest = (*rope_table(10, interleaved, interleaved), 4, 2, interleaved)
    compare("rope", torch.float32, [random(2, 5, 8 * 24)], *rest)
    weights = [1 + 0.2 * random(24, seed=seed) for seed in (1, 2)]
    compare("norm_rope", torch.float32, [random(2, 5, 8 * 24), *weights], 1e-6, *rest)


def test_without_rope() -> None:
    compare("rope", torch.float32, [random(2, 5, 8 * 24)], None, None, 4, 2)
    weights = [1 + 0.2 * random(24, seed=seed) for seed in (1, 2)]
    compare("norm_rope", torch.float32, [random(2, 5, 8 * 24), *weights], 1e-6, None, None, 4, 2)


LATENT_SHAPES = [(3, 12, 8, 10), (1, 24, 6, 4), (4, 16, 8, 16)]
"""Heads, dims of a key without and with positions, width of values."""


@each_value(dtype=DTYPES, shape=LATENT_SHAPES, interleaved=[False, True])
def test_queries_of_latent_attention(dtype: torch.dtype, shape: tuple[int, int, int, int], interleaved: bool) -> None:
    heads, fixed, rotated, _ = shape
    x = random(2, 5, heads, fixed + rotated, dtype=dtype).transpose(1, 2)
    compare("rotate_end", dtype, [x], *rope_table(rotated, False, interleaved), interleaved)


@each_value(dtype=DTYPES, shape=LATENT_SHAPES)
def test_keys_of_latent_attention(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    heads, fixed, shared, values = shape
    own = random(2, 7, heads, fixed + values, dtype=dtype)
    compare("join_keys", dtype, [own, random(2, 7, shared, dtype=dtype)], values)


@pairwise(dtype=DTYPES, top_k=[1, 2, 3], columns=[64, 2048 + 40])
def test_sum_rows(dtype: torch.dtype, top_k: int, columns: int) -> None:
    rows, dy = random(7 * top_k, columns, dtype=dtype), random(7, columns, dtype=dtype, seed=1)
    index = torch.randperm(7 * top_k, generator=torch.Generator().manual_seed(0)).view(7, top_k).to(DEVICE)
    weight = random(7, top_k, seed=2).abs()
    fused, reference = TritonKernels(), Kernels()
    for factor in (weight, None):
        close(fused.sum_rows(rows, index, factor), reference.sum_rows(rows.float(), index, factor).to(dtype), dtype)
    actual = fused.sum_rows_backward(dy, rows, index, weight)
    expected = reference.sum_rows_backward(dy.float(), rows.float(), index, weight)
    close(actual[0], expected[0].to(dtype), dtype)
    close(actual[1], expected[1], torch.float32 if dtype == torch.float32 else dtype)


@pairwise(dtype=DTYPES, vocab=[100, 4096 + 77], weighted={"weights": True, "plain": False})
def test_cross_entropy(dtype: torch.dtype, vocab: int, weighted: bool) -> None:
    logits = 4 * random(6, vocab, dtype=dtype)
    logits[1] -= 1000  # all logits far below zero
    logits[2, 5] = 500  # the label has probability 1
    labels = torch.tensor([3, vocab - 1, 5, IGNORE_INDEX, 0, IGNORE_INDEX], dtype=torch.int32, device=DEVICE)
    actual, expected = logits.clone(), logits.clone()
    fused = TritonKernels.cross_entropy_
    assert fused is not None
    weights = random(6) if weighted else None
    losses = fused(actual, labels, IGNORE_INDEX, weights)
    expected_losses = torch_chunk_loss(expected, labels, ModelOutput(logits, logits), weights)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert actual[3].abs().max() == 0
    assert actual[2].abs().max() == 0
    untouched = logits.clone()
    torch.testing.assert_close(fused(untouched, labels, IGNORE_INDEX, writes_gradient=False), losses, rtol=0, atol=0)
    assert torch.equal(untouched, logits)


def scalars(apply: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values = (0.01, 0.5, (0.1, 0.05), apply)
    lr, scale, correct, apply_update = (torch.tensor(value, device=DEVICE) for value in values)
    return lr, scale, correct, apply_update


@pairwise(apply={"apply": True, "skip": False}, grad_dtype=DTYPES, bf16_copy={"copy": True, "no-copy": False})
def test_adamw(apply: bool, grad_dtype: torch.dtype, bf16_copy: bool) -> None:
    count = 5000
    lr, scale, correct, apply_update = scalars(apply)
    state = [random(count, seed=1), random(count, dtype=grad_dtype, seed=2), random(count, seed=3), random(count).abs()]
    results = []
    for fused in (True, False):
        master, gradient, exp_avg, exp_avg_sq = (x.clone() for x in state)
        weight = master.bfloat16() if bf16_copy else master
        constants = (0.1, 0.9, 0.95, 1e-8)
        if fused:
            function = TritonKernels.adamw_
            assert function is not None
            scalar_tensor = torch.cat((torch.stack((lr, scale)), correct, apply_update.float()[None]))
            function(weight, master, gradient, exp_avg, exp_avg_sq, scalar_tensor, *constants)
        else:
            adamw_(weight, master, gradient, (exp_avg, exp_avg_sq), (lr, scale, correct, apply_update), constants)
        results.append((weight, master, exp_avg, exp_avg_sq))
    for ours, theirs, old in zip(*results, (state[0], state[0], state[2], state[3]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5 if ours.dtype == torch.float32 else 1e-2, atol=1e-7)
        assert torch.equal(ours, old.to(ours.dtype)) != apply


@pytest.mark.parametrize("apply", [True, False])
def test_adamw_with_stochastic_rounding_uses_the_same_bits(apply: bool) -> None:
    rows, columns = 37, 70
    lr, scale, correct, apply_update = scalars(apply)
    weight = random(rows, columns, dtype=torch.bfloat16)
    gradient, exp_avg, exp_avg_sq = (random(rows, columns, seed=seed) for seed in (2, 3, 4))
    key = torch.tensor(key32(1, "rounding", 5), dtype=torch.int32, device=DEVICE)
    site = torch.tensor(key32("rounding", "x")[0], dtype=torch.int32, device=DEVICE)
    row, column = (torch.arange(n, dtype=torch.int32, device=DEVICE) for n in (rows, columns))
    seed0, seed1 = row_seeds(key, row + 1000, torch.zeros_like(row))
    seeds = (seed0[:, None], seed1[:, None])
    scalar_tensor = torch.cat((torch.stack((lr, scale)), correct, apply_update.float()[None]))
    results = []
    for fused in (True, False):
        w, g, m, v = (x.clone() for x in (weight, gradient, exp_avg, exp_avg_sq.abs()))
        constants = (0.1, 0.9, 0.95, 1e-8)
        if fused:
            function = TritonKernels.adamw_stochastic_rounding_
            assert function is not None
            function(w, key, row + 1000, site, column + 3, g, m, v, scalar_tensor, *constants)
        else:
            scalar_tensors = (lr, scale, correct, apply_update)
            adamw_stochastic_rounding_(w, seeds, site, column + 3, g, (m, v), scalar_tensors, constants)
        results.append(w)
    actual, expected = results
    assert torch.equal(actual, weight) != apply
    # New values may differ in the last bit of fp32, which rarely changes the rounding of a weight.
    assert (actual != expected).float().mean() < 0.002
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-30)


def test_compiled_block_keeps_the_kernels() -> None:
    fused = TritonKernels()

    def block(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, n = fused.add_rms_norm(x, None, weight, 1e-5)
        q, k, v = fused.rope(n, cos, sin, 2, 1)
        y = torch.cat([t.transpose(1, 2).flatten(2) for t in (q, k, v)], -1)
        x, n = fused.add_rms_norm(x, y, weight, 1e-5)
        h = fused.swiglu(n)
        return x + torch.cat((h, h), -1)

    x, weight = random(2, 3, 4 * 8), random(4 * 8)
    angle = torch.cat([random(3, 4)] * 2, -1)
    results = []
    for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = run(*inputs, angle.cos(), angle.sin())
        out.square().sum().backward()
        results.append([out.detach(), *(t.grad for t in inputs if t.grad is not None)])
    for x, y in zip(*results, strict=True):
        close(x, y, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "total_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)  # gradients never accumulate in less precision than the weights have
def test_linear_accumulates_the_weight_gradient_into_its_buffer(dtype: torch.dtype, total_dtype: torch.dtype) -> None:
    weight, bias = random(6, 8, dtype=dtype).requires_grad_(), random(6, dtype=dtype).requires_grad_()
    fused, notified = TritonKernels(), []
    total = random(6, 8, dtype=total_dtype, seed=3)
    old_total = total.float().clone()
    fused.wgrad_buffers[weight] = total
    accumulate_into(weight, total, lambda: notified.append(1))
    x = random(2, 5, 8, dtype=dtype).requires_grad_()
    dy = random(2, 5, 6, dtype=dtype, seed=5)
    fused.linear(x, weight, bias).backward(dy)
    assert notified == [1]
    inputs = [t.detach().float().requires_grad_() for t in (x, weight, bias)]
    F.linear(*inputs).backward(dy.float())
    dx, d_weight, d_bias = (t.grad for t in inputs)
    assert dx is not None
    assert d_weight is not None
    assert d_bias is not None
    close(total, (old_total + d_weight).to(total_dtype), dtype if total_dtype == dtype else torch.bfloat16)
    for actual, expected in ((x.grad, dx), (bias.grad, d_bias)):
        assert actual is not None
        close(actual, expected.to(dtype), dtype)


Call = Callable[[Kernels, Tensor, list[Tensor]], Tensor]
VECTORS: dict[str, tuple[int, Call]] = {
    "rms norm": (1, lambda k, x, v: k.add_rms_norm(x, None, v[0], 1e-5)[1]),
    "rms norm of a sum": (1, lambda k, x, v: k.add_rms_norm(x, x, v[0], 1e-5)[1]),
    "layer norm": (3, lambda k, x, v: k.add_layer_norm(x, x, v[2], v[0], v[1], 1e-5, make_dropout(0.2), True)[1]),
    "layer norm without bias": (2, lambda k, x, v: k.add_layer_norm(x, x, None, v[0], v[1], 1e-5, None)[1]),
    "dropout": (1, lambda k, x, v: k.add_dropout(x, x, v[0], make_dropout(0.2))),
    "gelu": (1, lambda k, x, v: k.bias_gelu(x, v[0], False)),
}


@pairwise(dtype=DTYPES, columns=[40, 128 + 24], tokens=[1, 90])
def test_embedding_gradient_accumulates_into_its_buffer(dtype: torch.dtype, columns: int, tokens: int) -> None:
    """Tokens repeat: one is half of the text, so that its rows take several tiles."""
    weight = torch.nn.Parameter(random(11, columns, dtype=dtype))
    index = torch.randint(0, 11, (2, tokens), generator=torch.Generator().manual_seed(0)).int().to(DEVICE)
    index[0] = 5
    grad = random(2, tokens, columns, dtype=dtype)
    total, notified, fused = random(11, columns, seed=1), [], TritonKernels()
    expected = total.clone()
    fused.wgrad_buffers[weight] = total
    accumulate_into(weight, total, lambda: notified.append(1))
    out = fused.embedding(index, weight)
    assert torch.equal(out, F.embedding(index, weight))
    out.backward(grad)
    expected.index_add_(0, index.flatten().long(), grad.flatten(0, 1).float())
    close(total, expected, torch.float32)
    assert notified == [1]


@each_value(name=list(VECTORS), total_dtype=DTYPES, one_without_buffer={"all-buffers": False, "one-missing": True})
def test_vector_gradients_accumulate_into_their_buffers(
    name: str, total_dtype: torch.dtype, one_without_buffer: bool
) -> None:
    """Into the buffers of all vectors or, if one is missing, through autograd into the same totals, as in training."""
    count, call = VECTORS[name]
    vectors = [(1 + 0.1 * random(80, seed=seed)).bfloat16().requires_grad_() for seed in range(count)]
    totals = [random(80, dtype=total_dtype, seed=9 + number) for number in range(count)]
    old_totals = [total.float().clone() for total in totals]
    fused, notified = TritonKernels(), []
    for number, (vector, total) in enumerate(zip(vectors, totals, strict=True)):
        accumulate_into(vector, total, partial(notified.append, number))
        if not (one_without_buffer and number == count - 1):
            fused.wgrad_buffers[vector] = total
    x, dy = random(2, 7, 80, dtype=torch.bfloat16), random(2, 7, 80, dtype=torch.bfloat16, seed=3)
    call(fused, x, vectors).backward(dy)
    assert sorted(notified) == list(range(count))
    reference_vectors = [vector.detach().float().requires_grad_() for vector in vectors]
    call(Kernels(), x.float(), reference_vectors).backward(dy.float())
    for total, old, reference in zip(totals, old_totals, reference_vectors, strict=True):
        assert reference.grad is not None
        close(total, (old + reference.grad).to(total_dtype), torch.bfloat16)


def test_column_sums_of_many_programs() -> None:
    partial_sums, totals = random(150, 3, 70), [random(70, seed=seed) for seed in range(3)]
    expected = [total + added for total, added in zip(totals, partial_sums.double().sum(0).float(), strict=True)]
    add_column_sums_(partial_sums, totals)
    for total, y in zip(totals, expected, strict=True):
        close(total, y, torch.float32)

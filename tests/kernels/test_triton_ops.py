"""Each fused kernel against its twin in plain torch: by Triton's interpreter on a CPU, for real on a GPU."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.counter_rng import DropoutRng, key32, row_seeds
from trainyard.kernels.reference import Kernels
from trainyard.kernels.triton.column_sums import add_column_sums_
from trainyard.kernels.triton.ops import TritonKernels
from trainyard.models.output import ModelOutput
from trainyard.train.cross_entropy import torch_chunk_loss
from trainyard.train.optim.optimizer import accumulate_into
from trainyard.train.optim.update_rules import adamw_, adamw_stochastic_rounding_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-20)
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert error < TOLERANCE[dtype], error


def compare(function: str, dtype: torch.dtype, tensors: list[Tensor], *rest: object) -> None:
    """Outputs, and gradients of every tensor, of the fused kernel and of its twin in fp32."""
    ours = [x.clone().requires_grad_() for x in tensors]
    theirs = [x.float().requires_grad_() for x in tensors]
    out, twin = getattr(TritonKernels(), function)(*ours, *rest), getattr(Kernels(), function)(*theirs, *rest)
    out, twin = (x if isinstance(x, tuple) else (x,) for x in (out, twin))
    weights = [random(*y.shape, dtype=dtype, seed=7 + number) for number, y in enumerate(twin)]
    torch.autograd.backward(out, weights)
    torch.autograd.backward(twin, [w.float() for w in weights])
    for x, y in zip(out, twin, strict=True):
        close(x.detach(), y.detach().to(dtype), dtype)
    for x, y in zip(ours, theirs, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        close(x.grad, y.grad.to(dtype), dtype)


def row_drops(p: float) -> DropoutRng | None:
    """For rows [2, 7]."""
    key, site = (torch.tensor(key32(word), dtype=torch.int32, device=DEVICE) for word in ("key", "site"))
    numbers = torch.arange(14, dtype=torch.int32, device=DEVICE).view(2, 7)
    return DropoutRng(p, *row_seeds(key, numbers, numbers * 3), site[0]) if p else None


@DTYPES
@pytest.mark.parametrize("columns", [64, 96])
def test_swiglu(dtype: torch.dtype, columns: int) -> None:
    compare("swiglu", dtype, [random(3, 5, 2 * columns, dtype=dtype)])


@DTYPES
@pytest.mark.parametrize("tanh", [False, True])
def test_gelu(dtype: torch.dtype, tanh: bool) -> None:
    x = 3 * random(3, 5, 80, dtype=dtype)
    x[0, 0, :5] = torch.tensor([0.0, 30.0, -30.0, 1e-4, -1e-4])
    compare("gelu", dtype, [x, 0.1 * random(80, dtype=dtype)], tanh)


@pytest.mark.parametrize(("rows", "columns"), [(40, 600), (300, 16)])
def test_gelu_of_more_than_a_tile(rows: int, columns: int) -> None:
    compare("gelu", torch.float32, [random(rows, columns), random(columns)], False)


def test_saved_tensors_are_read_once() -> None:
    """Under recomputation torch makes them for one reader."""
    kernels = TritonKernels()
    x, y, vectors = random(2, 7, 80), random(2, 7, 80, seed=1), [random(80, seed=seed) for seed in (2, 3, 4, 5)]

    def block(x: Tensor, *given: Tensor) -> Tensor:
        scale, bias, y_bias, more = given
        total, out = kernels.add_layer_norm(x, y, y_bias, scale, bias, 1e-5, row_drops(0.2))
        return kernels.add_dropout(total, kernels.bias_gelu(out, more, True), bias, row_drops(0.1))

    results = []
    for recomputed in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, *vectors)]
        out = checkpoint(block, *leaves, use_reentrant=False) if recomputed else block(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_swiglu_wider_than_a_block() -> None:
    compare("swiglu", torch.float32, [random(2, 2 * 1500)])


@DTYPES
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("columns", [32, 80])
def test_norm(dtype: torch.dtype, added: bool, columns: int) -> None:
    x, y = (random(2, 7, columns, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = 1 + 0.1 * random(columns, dtype=dtype)
    fused, plain = TritonKernels(), Kernels()

    def run(kernels: Kernels, *tensors: Tensor) -> list[Tensor]:
        first, second, scale = (t.clone().requires_grad_() for t in tensors)
        total, out = kernels.add_rms_norm(first, second if added else None, scale, 1e-5)
        # The sum goes on in the block and its gradient comes back too.
        (total * random(*total.shape, seed=3).to(total) + out * random(*out.shape, seed=4).to(out)).sum().backward()
        grads = [t.grad for t in ((first, second, scale) if added else (first, scale))]
        return [total.detach(), out.detach(), *(g for g in grads if g is not None)]

    ours, theirs = run(fused, x, y, weight), run(plain, x.float(), y.float(), weight.float())
    assert len(ours) == len(theirs) == 4 + added
    for one, other in zip(ours, theirs, strict=True):
        close(one, other.to(dtype), dtype)


@DTYPES
@pytest.mark.parametrize("added", ["nothing", "y", "y and bias"])
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize(
    ("read", "after"), [("both", False), ("both", True), ("second", False), ("second", True), ("first", True)]
)  # a norm that nobody reads is not made
def test_layer_norm(dtype: torch.dtype, added: str, p: float, read: str, after: bool) -> None:
    """With dropout, residual and the bias of the product before it; the sum, or the norm once more, goes on in the
    block, or does not."""
    columns = 80
    x, y = (random(2, 7, columns, dtype=dtype, seed=seed) for seed in (1, 2))
    vectors = [1 + 0.1 * random(columns, dtype=dtype, seed=seed) for seed in (3, 4, 5)]
    drops = row_drops(p)

    def run(kernels: Kernels, *tensors: Tensor) -> list[Tensor]:
        a, b, weight, bias, y_bias = (t.clone().requires_grad_() for t in tensors)
        given = (b if added != "nothing" else None, y_bias if added == "y and bias" else None)
        used_drops = None if given[0] is None else drops
        total, out = kernels.add_layer_norm(a, *given, weight, bias, 1e-5, used_drops, after)
        wanted = {"both": (total, out), "second": (out,), "first": (total,)}[read]
        torch.autograd.backward(wanted, [random(*x.shape, seed=seed).to(x.dtype) for seed, x in enumerate(wanted)])
        used = [t for t in (a, b, weight, bias, y_bias) if t.grad is not None]
        return [total.detach(), out.detach(), *(t.grad for t in used if t.grad is not None)]

    ours = run(TritonKernels(), x, y, *vectors)
    theirs = run(Kernels(), x.float(), y.float(), *(v.float() for v in vectors))
    assert len(ours) == len(theirs) == {"nothing": 5, "y": 6, "y and bias": 7}[added]
    for one, other in zip(ours, theirs, strict=True):
        close(one, other.to(dtype), dtype)


@DTYPES
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_dropout(dtype: torch.dtype, added: bool, biased: bool, p: float) -> None:
    x, y, bias = random(2, 7, 80, dtype=dtype), random(2, 7, 80, dtype=dtype, seed=1), random(80, dtype=dtype)
    drops = row_drops(p)

    def run(kernels: Kernels, *tensors: Tensor) -> list[Tensor]:
        a, b, c = (t.clone().requires_grad_() for t in tensors)
        out = kernels.add_dropout(a if added else None, b, c if biased else None, drops)
        out.backward(random(2, 7, 80, seed=3).to(out))
        return [out.detach(), *(t.grad for t in (a, b, c) if t.grad is not None)]

    ours, theirs = run(TritonKernels(), x, y, bias), run(Kernels(), x.float(), y.float(), bias.float())
    assert len(ours) == len(theirs) == 2 + added + biased
    for one, other in zip(ours, theirs, strict=True):
        close(one, other.to(dtype), dtype)


def test_norm_of_many_rows_sums_the_weight_gradient_over_all() -> None:
    x, weight = random(1500, 8), random(8)
    grads = []
    for kernels in (TritonKernels(), Kernels()):
        w = weight.clone().requires_grad_()
        kernels.add_rms_norm(x, None, w, 1e-5)[1].square().sum().backward()
        assert w.grad is not None
        grads.append(w.grad)
    close(grads[0], grads[1], torch.float32)


@DTYPES
@pytest.mark.parametrize(("heads", "kv", "size"), [(4, 4, 16), (6, 2, 24), (3, 1, 8)])
@pytest.mark.parametrize("own", [False, True], ids=["same-positions", "positions-by-sample"])
def test_rope(dtype: torch.dtype, heads: int, kv: int, size: int, own: bool) -> None:
    qkv = random(2, 5, (heads + 2 * kv) * size, dtype=dtype)
    angle = random(2, 1, 5, size // 2) if own else random(5, size // 2)
    angle = torch.cat((angle, angle), -1)
    compare("rope", dtype, [qkv], angle.cos(), angle.sin(), heads, kv)


@DTYPES
@pytest.mark.parametrize("words", [100, 4096 + 77])
def test_cross_entropy(dtype: torch.dtype, words: int) -> None:
    logits = 4 * random(6, words, dtype=dtype)
    logits[1] -= 1000  # all far below zero
    logits[2, 5] = 500  # certain
    labels = torch.tensor([3, words - 1, 5, IGNORE_INDEX, 0, IGNORE_INDEX], dtype=torch.int32, device=DEVICE)
    ours, theirs = logits.clone(), logits.clone()
    fused = TritonKernels.cross_entropy_
    assert fused is not None
    losses = fused(ours, labels, IGNORE_INDEX)
    total = torch_chunk_loss(theirs, labels, ModelOutput(logits, logits))
    torch.testing.assert_close(losses.sum(), total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert ours[3].abs().max() == 0
    assert ours[2].abs().max() == 0


def scalars(ok: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values = (0.01, 0.5, (0.1, 0.05), ok)
    lr, scale, correct, fine = (torch.tensor(value, device=DEVICE) for value in values)
    return lr, scale, correct, fine


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("copied", [True, False])
def test_adamw(ok: bool, gradients: torch.dtype, copied: bool) -> None:
    count = 5000
    lr, scale, correct, fine = scalars(ok)
    state = [random(count, seed=1), random(count, dtype=gradients, seed=2), random(count, seed=3), random(count).abs()]
    results = []
    for fused in (True, False):
        master, gradient, first, second = (x.clone() for x in state)
        weight = master.bfloat16() if copied else master
        constants = (0.1, 0.9, 0.95, 1e-8)
        if fused:
            function = TritonKernels.adamw_
            assert function is not None
            together = torch.cat((torch.stack((lr, scale)), correct, fine.float()[None]))
            function(weight, master, gradient, first, second, together, *constants)
        else:
            adamw_(weight, master, gradient, first, second, lr, scale, correct, fine, *constants)
        results.append((weight, master, first, second))
    for one, other, old in zip(*results, (state[0], state[0], state[2], state[3]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5 if one.dtype == torch.float32 else 1e-2, atol=1e-7)
        assert torch.equal(one, old.to(one.dtype)) != ok


@pytest.mark.parametrize("ok", [True, False])
def test_rounded_adamw_draws_the_same_bits(ok: bool) -> None:
    rows, columns = 37, 70
    lr, scale, correct, fine = scalars(ok)
    weight = random(rows, columns, dtype=torch.bfloat16)
    gradient, first, second = (random(rows, columns, seed=seed) for seed in (2, 3, 4))
    key = torch.tensor(key32(1, "rounding", 5), dtype=torch.int32, device=DEVICE)
    site = torch.tensor(key32("rounding", "x")[0], dtype=torch.int32, device=DEVICE)
    row, column = (torch.arange(n, dtype=torch.int32, device=DEVICE) for n in (rows, columns))
    words = row_seeds(key, row + 1000, torch.zeros_like(row))
    words = (words[0][:, None], words[1][:, None])
    together = torch.cat((torch.stack((lr, scale)), correct, fine.float()[None]))
    results = []
    for fused in (True, False):
        w, g, m, v = (x.clone() for x in (weight, gradient, first, second.abs()))
        constants = (0.1, 0.9, 0.95, 1e-8)
        if fused:
            function = TritonKernels.adamw_stochastic_rounding_
            assert function is not None
            function(w, key, row + 1000, site, column + 3, g, m, v, together, *constants)
        else:
            adamw_stochastic_rounding_(w, words, site, column + 3, g, m, v, lr, scale, correct, fine, *constants)
        results.append(w)
    ours, theirs = results
    assert torch.equal(ours, weight) != ok
    # The new values may differ in the last bit of fp32, which moves a weight in few cases of many.
    assert (ours != theirs).float().mean() < 0.002
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-30)


def test_compiled_blocks_take_the_kernels_whole() -> None:
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
    for one, other in zip(*results, strict=True):
        close(one, other, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "total_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)  # gradients are never summed in less than the weights have
def test_products_add_their_weights_gradient_where_it_is_summed(dtype: torch.dtype, total_dtype: torch.dtype) -> None:
    weight, bias = random(6, 8, dtype=dtype).requires_grad_(), random(6, dtype=dtype).requires_grad_()
    fused, told = TritonKernels(), []
    total = random(6, 8, dtype=total_dtype, seed=3)
    before = total.float().clone()
    fused.wgrad_buffers[weight] = total
    accumulate_into(weight, total, lambda: told.append(1))
    x = random(2, 5, 8, dtype=dtype).requires_grad_()
    dy = random(2, 5, 6, dtype=dtype, seed=5)
    fused.linear(x, weight, bias).backward(dy)
    assert told == [1]
    inputs = [t.detach().float().requires_grad_() for t in (x, weight, bias)]
    F.linear(*inputs).backward(dy.float())
    expected = [t.grad for t in inputs if t.grad is not None]
    close(total, (before + expected[1]).to(total_dtype), dtype if total_dtype == dtype else torch.bfloat16)
    for ours, theirs in ((x.grad, expected[0]), (bias.grad, expected[2])):
        assert ours is not None
        close(ours, theirs.to(dtype), dtype)


Call = Callable[[Kernels, Tensor, list[Tensor]], Tensor]
VECTORS: dict[str, tuple[int, Call]] = {
    "norm": (1, lambda k, x, v: k.add_rms_norm(x, None, v[0], 1e-5)[1]),
    "norm of a sum": (1, lambda k, x, v: k.add_rms_norm(x, x, v[0], 1e-5)[1]),
    "layer norm": (3, lambda k, x, v: k.add_layer_norm(x, x, v[2], v[0], v[1], 1e-5, row_drops(0.2), True)[1]),
    "layer norm without bias": (2, lambda k, x, v: k.add_layer_norm(x, x, None, v[0], v[1], 1e-5, None)[1]),
    "dropout": (1, lambda k, x, v: k.add_dropout(x, x, v[0], row_drops(0.2))),
    "gelu": (1, lambda k, x, v: k.bias_gelu(x, v[0], False)),
}


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("total_dtype", [torch.float32, torch.bfloat16], ids=["total-fp32", "total-bf16"])
@pytest.mark.parametrize("without", [False, True])
def test_vectors_gradients_go_where_they_are_summed(name: str, total_dtype: torch.dtype, without: bool) -> None:
    """To all sinks or, where one is missing, to autograd: which adds them to the same sums, as in training."""
    count, call = VECTORS[name]
    vectors = [(1 + 0.1 * random(80, seed=seed)).bfloat16().requires_grad_() for seed in range(count)]
    totals = [random(80, dtype=total_dtype, seed=9 + number) for number in range(count)]
    before = [total.float().clone() for total in totals]
    fused, told = TritonKernels(), []
    for number, (vector, total) in enumerate(zip(vectors, totals, strict=True)):
        arrived = partial(told.append, number)
        accumulate_into(vector, total, arrived)
        if not (without and number == count - 1):
            fused.wgrad_buffers[vector] = total
    x, dy = random(2, 7, 80, dtype=torch.bfloat16), random(2, 7, 80, dtype=torch.bfloat16, seed=3)
    call(fused, x, vectors).backward(dy)
    assert sorted(told) == list(range(count))
    twins = [vector.detach().float().requires_grad_() for vector in vectors]
    call(Kernels(), x.float(), twins).backward(dy.float())
    for total, old, twin in zip(totals, before, twins, strict=True):
        assert twin.grad is not None
        close(total, (old + twin.grad).to(total_dtype), torch.bfloat16)


def test_parts_of_many_programs_are_added_up() -> None:
    parts, totals = random(150, 3, 70), [random(70, seed=seed) for seed in range(3)]
    expected = [total + part for total, part in zip(totals, parts.double().sum(0).float(), strict=True)]
    add_column_sums_(parts, totals)
    for total, other in zip(totals, expected, strict=True):
        close(total, other, torch.float32)

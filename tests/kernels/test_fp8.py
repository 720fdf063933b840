"""Products in fp8: the plain twin against fp32, and the kernels against the twin bit by bit, by Triton's interpreter on
a CPU and for real on a GPU."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.kernels import fp8_linear
from trainyard.kernels.fp8_linear import Amax, Fp8Matrix, Fp8Options, fp8_linear, fp8_linear_reference
from trainyard.models.output import ModelOutput
from trainyard.train.cross_entropy import DenseHeadGemm, Fp8HeadGemm, chunked_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
BY_ROW = pytest.mark.parametrize("by_row", [False, True], ids=["tensor", "row"])
SCALING = pytest.mark.parametrize("scaling", ["tensor", "row"])
GRADIENTS = pytest.mark.parametrize("gradients", ["e5m2", "bf16"])
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
BOTH = pytest.mark.parametrize(
    "function",
    [pytest.param(fp8_linear, marks=needs_triton, id="kernels"), pytest.param(fp8_linear_reference, id="plain")],
)
Linear = Callable[[Tensor, Tensor, Tensor | None, Fp8Options], Tensor]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def error(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def same(ours: Tensor, theirs: Tensor) -> None:
    """Bit by bit, but for which nan it is."""
    ours, theirs = ours.cpu().contiguous(), theirs.cpu().contiguous()
    missing = theirs.float().isnan()
    integer = torch.uint8 if theirs.element_size() == 1 else torch.int32
    assert ours.shape == theirs.shape
    assert torch.equal(ours.float().isnan(), missing)
    assert torch.equal(ours.view(integer)[~missing], theirs.view(integer)[~missing])


def whole(matrix: Fp8Matrix) -> Tensor:
    return matrix.values.double() * matrix.inverse_scale[:, None].double()


def quantise(x: Tensor, dtype: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    """What a product sees of x by its rows, and by its columns."""
    most = fp8_linear.compute_amax(x, by_row, True, reference=True)
    rows, columns = fp8_linear.quantize(x, most, dtype, by_row, reference=True, transposed=True)
    return whole(rows), whole(columns).t()


# Numbers.


@FORMATS
def test_scales_are_the_largest_powers_of_two(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    edges = [0.0, 2.0**-149, 2.0**-126, 2.0**-118, 1.0, 1.75, 1.7500001, 1.9999999, 448.0, 449.0, 57344.0, 3.4e38]
    size = torch.cat((torch.tensor(edges), torch.randn(2000).abs() * 2.0 ** torch.randint(-100, 100, (2000,))))
    scale, inverse = fp8_linear.power_of_two_scales(size.view(torch.int32), dtype)
    mantissa, exponent = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    assert torch.equal(scale * inverse, torch.ones_like(scale))
    assert scale[0] == 1
    assert (size.double() * scale.double() <= top).all()
    larger = size.double() * scale.double() * 2 > top
    assert (larger | (exponent == 127) | (size == 0)).all()
    for bad in (torch.inf, torch.nan):
        assert torch.stack(fp8_linear.power_of_two_scales(torch.tensor([bad]).view(torch.int32), dtype)).isnan().all()


@FORMATS
def test_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    """Every bf16 that a format takes, subnormals too, against a search in the table of the format's numbers."""
    x = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    x = x[x <= torch.finfo(dtype).max]
    table = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    table = table[table.isfinite()]
    above = torch.searchsorted(table, x).clamp(1, len(table) - 1)
    low, high = x - table[above - 1], table[above] - x
    nearest = torch.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    matrix = x.to(torch.bfloat16).view(1, -1)
    cast, _ = fp8_linear.quantize(
        matrix, fp8_linear.compute_amax(matrix, False, reference=True), dtype, False, reference=True
    )
    assert cast.inverse_scale == 1
    assert torch.equal(cast.values[0].view(torch.uint8), nearest.to(torch.uint8))


@FORMATS
@BY_ROW
def test_changes_only_tiny_values_with_the_batch(dtype: torch.dtype, by_row: bool) -> None:
    """Two halves of the tokens have other largest values than the whole, and so other scales."""
    x = random(64, 256) * torch.exp(random(64, 256, seed=1))
    x[32:] *= 23
    x[:, :8] *= 1e-8
    rows, columns = quantise(x, dtype, by_row)
    halves = [quantise(half, dtype, by_row) for half in x.chunk(2)]
    for number, together in enumerate((rows, columns)):
        apart = torch.cat([half[number] for half in halves])
        most = x.double().abs().amax(() if not by_row else (1, 0)[number], keepdim=True)
        normal = x.double().abs() > most * 2 * torch.finfo(dtype).smallest_normal / torch.finfo(dtype).max
        assert torch.equal(together[normal], apart[normal])
        assert normal.double().mean() > 0.5
    assert not by_row or torch.equal(rows, torch.cat([half[0] for half in halves]))
    assert by_row or not torch.equal(rows, torch.cat([half[0] for half in halves]))


# Kernels against the twin.


def check_casts(x: Tensor, dtype: torch.dtype, by_row: bool) -> None:
    M, D = x.shape
    most, twin_most = (
        fp8_linear.compute_amax(x, by_row, True),
        fp8_linear.compute_amax(x.cpu(), by_row, True, reference=True),
    )
    if by_row:
        assert torch.equal(most.rows.cpu(), twin_most.rows)
        assert torch.equal(most.columns.cpu(), twin_most.columns)
    else:
        assert torch.equal(most.rows.max().cpu(), twin_most.rows[0])
    twin, twin_turned = fp8_linear.quantize(x.cpu(), twin_most, dtype, by_row, reference=True, transposed=True)
    for as_is, turned in ((True, True), (True, False), (False, True)):
        ours, ours_turned = fp8_linear.quantize(x, most, dtype, by_row, direct=as_is, transposed=turned)
        if as_is:
            assert ours.values.shape == (-(-M // 16) * 16, D)
            same(ours.values[:M], twin.values)
            same(ours.inverse_scale[: M if by_row else 1], twin.inverse_scale)
        if turned:
            assert ours_turned.values.shape == (D, -(-M // 16) * 16)
            same(ours_turned.values[:, :M], twin_turned.values)
            same(ours_turned.inverse_scale, twin_turned.inverse_scale)
        if x.isfinite().all():
            assert not ours.values[M:].float().any()
            assert not ours_turned.values[:, M:].float().any()
            assert not by_row or (ours.inverse_scale[M:] == 1).all()


@needs_triton
@FORMATS
@BY_ROW
@pytest.mark.parametrize("shape", [(1, 16), (77, 144), (300, 80), (64, 272)], ids=str)
def test_cast(shape: tuple[int, int], dtype: torch.dtype, by_row: bool) -> None:
    check_casts(random(*shape) * torch.exp(2 * random(*shape, seed=1)), dtype, by_row)


@needs_triton
@FORMATS
@BY_ROW
@pytest.mark.parametrize("kind", ["zero", "tiny", "huge", "inf", "nan"])
def test_cast_of_odd_values(kind: str, dtype: torch.dtype, by_row: bool) -> None:
    x = random(21, 48)
    x *= {"zero": 0, "tiny": 1e-39, "huge": 5e37}.get(kind, 1)
    x[5, 7] = {"inf": -torch.inf, "nan": torch.nan}.get(kind, 0)
    check_casts(x, dtype, by_row)


@needs_triton
@FORMATS
def test_cast_of_every_number(dtype: torch.dtype) -> None:
    """All bf16 that the format takes, so that the scale is 1: on a GPU, its rounding bit by bit."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(x.abs() <= torch.finfo(dtype).max, x, 0.0)
    check_casts(x.view(512, 128).to(DEVICE), dtype, False)


@needs_triton
def test_cast_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of a large matrix has several tiles, the last ones beyond the end."""
    monkeypatch.setattr("trainyard.kernels.triton.fp8_cast.PROGRAMS", 3)
    check_casts(random(700, 144), E4M3, False)
    check_casts(random(700, 144), E5M2, True)


@needs_triton
def test_cast_by_maxima_of_the_producer() -> None:
    """Any parts do: here the maxima of 600 rows."""
    x = random(600, 32)
    rows = fp8_linear.compute_amax(x, True).rows
    ours, _ = fp8_linear.quantize(x, Amax(rows, rows[:0]), E4M3, False)
    twin, _ = fp8_linear.quantize(x, fp8_linear.compute_amax(x, False, reference=True), E4M3, False, reference=True)
    same(ours.values[:600], twin.values)
    same(ours.inverse_scale, twin.inverse_scale)


@needs_triton
@SCALING
@GRADIENTS
@pytest.mark.parametrize("tokens", [48, 37])
def test_linear(scaling: Any, gradients: Any, tokens: int) -> None:
    def run(function: Linear) -> list[Tensor]:
        x, weight, bias = (t.requires_grad_() for t in (random(2, tokens, 96), random(64, 96), random(64)))
        y = function(x, weight, bias, Fp8Options(scaling, gradients))
        y.backward(random(*y.shape, seed=1))
        return [y.detach(), *(t.grad for t in (x, weight, bias) if t.grad is not None)]

    for ours, twin in zip(run(fp8_linear), run(fp8_linear_reference), strict=True):
        assert ours.dtype == twin.dtype == torch.bfloat16
        assert ours.shape == twin.shape
        assert error(ours, twin) < 1e-2


@needs_triton
@BY_ROW
def test_operators_say_their_shapes(by_row: bool) -> None:
    x = random(21, 48)
    tests = "test_faketensor"
    for columns in (False, True):
        torch.library.opcheck(fp8_linear.fp8_amax, (x, by_row, columns), test_utils=tests)
    most = fp8_linear.compute_amax(x, by_row, True)
    for flags in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(fp8_linear.fp8_cast, (x, *most, E5M2, by_row, *flags), test_utils=tests)
    left, right = (
        fp8_linear.quantize(t, fp8_linear.compute_amax(t, by_row), E4M3, by_row)[0] for t in (x, random(32, 48))
    )
    torch.library.opcheck(fp8_linear.fp8_matmul, (*left, *right, random(32), True), test_utils=tests)


# The function.


@SCALING
@GRADIENTS
def test_is_close_to_fp32(scaling: Any, gradients: Any) -> None:
    x, weight, bias, dy = random(3, 50, 128), random(96, 128, seed=1) * 0.02, random(96), random(3, 50, 96)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        tensors = [t.to(dtype).clone().requires_grad_() for t in (x, weight, bias)]
        exact = dtype == torch.float32
        y = F.linear(*tensors) if exact else fp8_linear_reference(*tensors, Fp8Options(scaling, gradients))
        y.backward(dy.to(dtype))
        results.append([(y - tensors[2]).detach(), *(t.grad for t in tensors)])
    (y, dx, d_weight, d_bias), (true_y, true_dx, true_d_weight, true_d_bias) = results
    limit = 0.08 if gradients == "e5m2" else 0.01
    assert 0.01 < error(y, true_y) < 0.04
    assert error(dx, true_dx) < limit
    assert error(d_weight, true_d_weight) < limit
    assert error(d_bias, true_d_bias) < 0.005


def test_by_row_bears_rows_far_apart() -> None:
    x, weight = random(64, 128, dtype=torch.float32), random(64, 128, seed=1, dtype=torch.float32)
    x[:4] *= 1e5
    weight[:4] *= 1e5
    exact = F.linear(x, weight)[4:, 4:]
    by_tensor, by_row = (
        error(fp8_linear_reference(x, weight, None, Fp8Options(scaling))[4:, 4:], exact)
        for scaling in ("tensor", "row")
    )
    assert by_row < 0.04 < 0.2 < by_tensor


@SCALING
def test_gradients_are_those_of_the_quantised_matrices(scaling: Any) -> None:
    """dx of the quantised W, dW of the quantised x, both of the quantised dy; each as scaled for its product."""
    x, weight, bias, dy = (random(*shape, dtype=torch.float32) for shape in ((33, 64), (48, 64), (48,), (33, 48)))
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = fp8_linear_reference(*leaves, Fp8Options(scaling))
    y.backward(dy)
    by_row = scaling == "row"
    (x_rows, x_columns), (w_rows, w_columns) = (quantise(t, E4M3, by_row) for t in (x, weight))
    dy_rows, dy_columns = quantise(dy, E5M2, by_row)
    twins = [t.requires_grad_() for t in (x_columns, w_columns)]
    dx, _ = torch.autograd.grad(F.linear(*twins), twins, dy_rows)
    _, d_weight = torch.autograd.grad(F.linear(*twins), twins, dy_columns)
    for ours, theirs in (
        (y, F.linear(x_rows, w_rows, bias.double())),
        (leaves[0].grad, dx),
        (leaves[1].grad, d_weight),
    ):
        assert ours is not None
        assert error(ours, theirs) < 1e-6
    assert leaves[2].grad is not None
    torch.testing.assert_close(leaves[2].grad, dy.sum(0))


@BOTH
@SCALING
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(function: Linear, scaling: Any, bad: float) -> None:
    x, weight = random(32, 64).requires_grad_(), random(48, 64).requires_grad_()
    wrong = x.detach().clone()
    wrong[3, 5] = bad
    assert not function(wrong, weight, None, Fp8Options(scaling))[3].isfinite().any()
    dy = random(32, 48)
    dy[3, 5] = bad
    function(x, weight, None, Fp8Options(scaling)).backward(dy)
    assert x.grad is not None
    assert weight.grad is not None
    assert not x.grad[3].isfinite().any()
    assert not weight.grad[5].isfinite().any()


@BOTH
@GRADIENTS
@pytest.mark.parametrize("needed", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["all", "x", "weight", "bias"])
def test_only_what_is_needed(function: Linear, gradients: Any, needed: tuple[int, int, int]) -> None:
    """Of x a byte an element is kept, of the weight nothing but itself; and no gradients that nobody asked for."""
    tensors = [random(64, 128), random(32, 128), random(32)]
    for tensor, flag in zip(tensors, needed, strict=True):
        tensor.requires_grad_(bool(flag))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = function(*tensors, Fp8Options("tensor", gradients))
    size = sum(t.numel() * t.element_size() for t in kept if t.data_ptr() != tensors[1].data_ptr())
    assert size <= 64 * 128 * (1 if gradients == "e5m2" else 2) * needed[1] + 64
    y.sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == [bool(flag) for flag in needed]


@BOTH
@pytest.mark.parametrize(
    "how", [Fp8Options("tensor", "e5m2"), Fp8Options("row", "e5m2", False), Fp8Options("tensor", "bf16")], ids=str
)
def test_compiled(function: Linear, how: Fp8Options) -> None:
    def run(step: Callable[..., Tensor]) -> list[Tensor]:
        x, weight, bias = (t.requires_grad_() for t in (random(2, 13, 64), random(32, 64), random(32)))
        y = step(x, weight, bias)
        y.backward(random(*y.shape, seed=1))
        with torch.no_grad():
            again = step(x, weight, bias)
        return [y.detach(), again, *(t.grad for t in (x, weight, bias) if t.grad is not None)]

    torch.compiler.reset()
    step = lambda x, weight, bias: function(x, weight, bias, how)  # noqa: E731
    for compiled, eager in zip(run(torch.compile(step, backend="aot_eager", fullgraph=True)), run(step), strict=True):
        assert torch.equal(compiled, eager)


@BOTH
def test_sizes_that_do_not_fit(function: Linear) -> None:
    with pytest.raises(UserError, match=r"40 x 64.*multiples of 16"):
        function(random(8, 64), random(40, 64), None, Fp8Options())


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("gradients", ["e5m2", "bf16"])
@pytest.mark.parametrize("biased", [True, False])
def test_the_output_head_in_fp8(scaling: Any, gradients: Any, biased: bool) -> None:
    """Loss and gradients near those of bf16, by plain torch and by the device's own products."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((40, 32), (100, 32), (100,))  # a vocabulary that is padded
    hidden, weight, bias = (torch.randn(*size, generator=generator).to(DEVICE, torch.bfloat16) for size in sizes)
    labels = torch.randint(0, 100, (40,), generator=generator).to(DEVICE, torch.int32)
    labels[3] = IGNORE_INDEX

    def run(products: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, *([bias] if biased else []))]
        output = ModelOutput(leaves[0][None], leaves[1], leaves[2] if biased else None)
        loss = chunked_cross_entropy(output, labels, products=products, logits_bytes=4 * 100 * 16)
        loss.backward()
        return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    wanted = run(DenseHeadGemm)
    kinds = [True] if DEVICE == "cpu" else [True, False]  # this CPU has no fp8 products of its own
    for plain in kinds:
        for mine, other in zip(
            run(partial(Fp8HeadGemm, how=Fp8Options(scaling, gradients), plain=plain)), wanted, strict=True
        ):
            error = (mine.float() - other.float()).norm() / other.float().norm()
            assert 0 < error < 0.1  # e5m2 alone rounds by 7 %

"""fp8 linear layers: the reference against fp32, and the kernels against the reference bit by bit, in Triton's
interpreter on a CPU and compiled on a GPU."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.pairwise import each_value, pairwise
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.kernels import fp8_linear as fp8
from trainyard.kernels.fp8_linear import Amax, Fp8Matrix, Fp8Options, fp8_linear
from trainyard.models.output import ModelOutput
from trainyard.train.cross_entropy import Fp8HeadGemm, HeadGemm, chunked_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = {"e4m3": E4M3, "e5m2": E5M2}
PER_ROW = {"tensor": False, "row": True}
SCALING = ["tensor", "row"]
GRAD_FORMATS = ["e5m2", "bf16"]
fp8_linear_reference = partial(fp8_linear, reference=True)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
FUNCTIONS = {"reference": fp8_linear_reference} | ({"kernels": fp8_linear} if find_spec("triton") else {})
Linear = Callable[[Tensor, Tensor, Tensor | None, Fp8Options], Tensor]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Compare bit by bit, except for the payload of nan."""
    actual, expected = actual.cpu().contiguous(), expected.cpu().contiguous()
    nan = expected.float().isnan()
    integer = torch.uint8 if expected.element_size() == 1 else torch.int32
    assert actual.shape == expected.shape
    assert torch.equal(actual.float().isnan(), nan)
    assert torch.equal(actual.view(integer)[~nan], expected.view(integer)[~nan])


def dequantize(matrix: Fp8Matrix) -> Tensor:
    return matrix.values.double() * matrix.inverse_scale[:, None].double()


def quantized_views(x: Tensor, dtype: torch.dtype, per_row: bool) -> tuple[Tensor, Tensor]:
    """The values of x as a product sees them along its rows and along its columns."""
    amax = fp8.compute_amax(x, per_row, True, reference=True)
    rows, columns = fp8.quantize(x, amax, dtype, per_row, reference=True, transposed=True)
    return dequantize(rows), dequantize(columns).t()


# Scales and rounding.


@pairwise(dtype=DTYPES)
def test_scales_are_the_largest_powers_of_two(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    edges = [0.0, 2.0**-149, 2.0**-126, 2.0**-118, 1.0, 1.75, 1.7500001, 1.9999999, 448.0, 449.0, 57344.0, 3.4e38]
    size = torch.cat((torch.tensor(edges), torch.randn(2000).abs() * 2.0 ** torch.randint(-100, 100, (2000,))))
    scale, inverse = fp8.power_of_two_scales(size.view(torch.int32), dtype)
    mantissa, exponent = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    assert torch.equal(scale * inverse, torch.ones_like(scale))
    assert scale[0] == 1
    assert (size.double() * scale.double() <= top).all()
    larger = size.double() * scale.double() * 2 > top
    assert (larger | (exponent == 127) | (size == 0)).all()
    for value in (torch.inf, torch.nan):
        assert torch.stack(fp8.power_of_two_scales(torch.tensor([value]).view(torch.int32), dtype)).isnan().all()


@pairwise(dtype=DTYPES)
def test_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    """Every bf16 in the range of a format, subnormals included, against a search in the table of its numbers."""
    x = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    x = x[x <= torch.finfo(dtype).max]
    table = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    table = table[table.isfinite()]
    above = torch.searchsorted(table, x).clamp(1, len(table) - 1)
    low, high = x - table[above - 1], table[above] - x
    nearest = torch.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    matrix = x.to(torch.bfloat16).view(1, -1)
    cast, _ = fp8.quantize(matrix, fp8.compute_amax(matrix, False, reference=True), dtype, False, reference=True)
    assert cast.inverse_scale == 1
    assert torch.equal(cast.values[0].view(torch.uint8), nearest.to(torch.uint8))


@pairwise(dtype=DTYPES, per_row=PER_ROW)
def test_a_different_batch_changes_only_tiny_values(dtype: torch.dtype, per_row: bool) -> None:
    """Each half of the tokens has a different amax than the full batch, and so a different scale."""
    x = random(64, 256) * torch.exp(random(64, 256, seed=1))
    x[32:] *= 23
    x[:, :8] *= 1e-8
    rows, columns = quantized_views(x, dtype, per_row)
    half_views = [quantized_views(half, dtype, per_row) for half in x.chunk(2)]
    for dim, full in enumerate((rows, columns)):
        by_halves = torch.cat([half[dim] for half in half_views])
        amax = x.double().abs().amax(() if not per_row else (1, 0)[dim], keepdim=True)
        normal = x.double().abs() > amax * 2 * torch.finfo(dtype).smallest_normal / torch.finfo(dtype).max
        assert torch.equal(full[normal], by_halves[normal])
        assert normal.double().mean() > 0.5
    assert not per_row or torch.equal(rows, torch.cat([half[0] for half in half_views]))
    assert per_row or not torch.equal(rows, torch.cat([half[0] for half in half_views]))


# Kernels against the reference.


def check_casts(x: Tensor, dtype: torch.dtype, per_row: bool) -> None:
    M, D = x.shape
    amax, expected_amax = (
        fp8.compute_amax(x, per_row, True),
        fp8.compute_amax(x.cpu(), per_row, True, reference=True),
    )
    if per_row:
        assert torch.equal(amax.rows.cpu(), expected_amax.rows)
        assert torch.equal(amax.columns.cpu(), expected_amax.columns)
    else:
        assert torch.equal(amax.rows.max().cpu(), expected_amax.rows[0])
    expected, expected_transposed = fp8.quantize(
        x.cpu(), expected_amax, dtype, per_row, reference=True, transposed=True
    )
    for direct, transposed in ((True, True), (True, False), (False, True)):
        actual, actual_transposed = fp8.quantize(x, amax, dtype, per_row, direct=direct, transposed=transposed)
        if direct:
            assert actual.values.shape == (-(-M // 16) * 16, D)
            assert_same_bits(actual.values[:M], expected.values)
            assert_same_bits(actual.inverse_scale[: M if per_row else 1], expected.inverse_scale)
        if transposed:
            assert actual_transposed.values.shape == (D, -(-M // 16) * 16)
            assert_same_bits(actual_transposed.values[:, :M], expected_transposed.values)
            assert_same_bits(actual_transposed.inverse_scale, expected_transposed.inverse_scale)
        if x.isfinite().all():
            assert not actual.values[M:].float().any()
            assert not actual_transposed.values[:, M:].float().any()
            assert not per_row or (actual.inverse_scale[M:] == 1).all()


@needs_triton
@pairwise(shape=[(1, 16), (77, 144), (300, 80), (64, 272)], dtype=DTYPES, per_row=PER_ROW)
def test_cast(shape: tuple[int, int], dtype: torch.dtype, per_row: bool) -> None:
    check_casts(random(*shape) * torch.exp(2 * random(*shape, seed=1)), dtype, per_row)


@needs_triton
@pairwise(kind=["zero", "tiny", "huge", "inf", "nan"], dtype=DTYPES, per_row=PER_ROW)
def test_cast_of_extreme_values(kind: str, dtype: torch.dtype, per_row: bool) -> None:
    x = random(21, 48)
    x *= {"zero": 0, "tiny": 1e-39, "huge": 5e37}.get(kind, 1)
    x[5, 7] = {"inf": -torch.inf, "nan": torch.nan}.get(kind, 0)
    check_casts(x, dtype, per_row)


@needs_triton
@pairwise(dtype=DTYPES)
def test_cast_of_every_number(dtype: torch.dtype) -> None:
    """Every bf16 in the range of the format, so that the scale is 1: checks the rounding bit by bit."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(x.abs() <= torch.finfo(dtype).max, x, 0.0)
    check_casts(x.view(512, 128).to(DEVICE), dtype, False)


@needs_triton
def test_cast_of_several_tiles_per_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large matrix each program has several tiles; the last ones lie beyond the end."""
    monkeypatch.setattr("trainyard.kernels.triton.fp8_cast.MAX_CAST_PROGRAMS", 3)
    check_casts(random(300, 80), E4M3, False)
    check_casts(random(300, 80), E5M2, True)


@needs_triton
def test_cast_with_amax_from_the_producer() -> None:
    """Any blocks work as amax: here the maxima of 600 rows."""
    x = random(600, 32)
    rows = fp8.compute_amax(x, True).rows
    actual, _ = fp8.quantize(x, Amax(rows, rows[:0]), E4M3, False)
    expected, _ = fp8.quantize(x, fp8.compute_amax(x, False, reference=True), E4M3, False, reference=True)
    assert_same_bits(actual.values[:600], expected.values)
    assert_same_bits(actual.inverse_scale, expected.inverse_scale)


@needs_triton
@pairwise(scaling=SCALING, grad_format=GRAD_FORMATS, tokens=[48, 37])
def test_linear(scaling: Any, grad_format: Any, tokens: int) -> None:
    def run(function: Linear) -> list[Tensor]:
        x, weight, bias = (t.requires_grad_() for t in (random(2, tokens, 96), random(64, 96), random(64)))
        y = function(x, weight, bias, Fp8Options(scaling, grad_format))
        y.backward(random(*y.shape, seed=1))
        return [y.detach(), *(t.grad for t in (x, weight, bias) if t.grad is not None)]

    for actual, expected in zip(run(fp8_linear), run(fp8_linear_reference), strict=True):
        assert actual.dtype == expected.dtype == torch.bfloat16
        assert actual.shape == expected.shape
        assert error(actual, expected) < 1e-2


@needs_triton
@pairwise(per_row=PER_ROW)
def test_opcheck_fake_tensors(per_row: bool) -> None:
    x = random(21, 48)
    tests = "test_faketensor"
    for columns in (False, True):
        torch.library.opcheck(fp8.fp8_amax, (x, per_row, columns), test_utils=tests)
    amax = fp8.compute_amax(x, per_row, True)
    for flags in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(fp8.fp8_cast, (x, *amax, E5M2, per_row, *flags), test_utils=tests)
    left, right = (fp8.quantize(t, fp8.compute_amax(t, per_row), E4M3, per_row)[0] for t in (x, random(32, 48)))
    torch.library.opcheck(fp8.fp8_matmul, (*left, *right, random(32), True), test_utils=tests)


# The layer.


@pairwise(scaling=SCALING, grad_format=GRAD_FORMATS)
def test_linear_is_close_to_fp32(scaling: Any, grad_format: Any) -> None:
    x, weight, bias, dy = random(3, 50, 128), random(96, 128, seed=1) * 0.02, random(96), random(3, 50, 96)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        tensors = [t.to(dtype).clone().requires_grad_() for t in (x, weight, bias)]
        exact = dtype == torch.float32
        y = F.linear(*tensors) if exact else fp8_linear_reference(*tensors, Fp8Options(scaling, grad_format))
        y.backward(dy.to(dtype))
        results.append([(y - tensors[2]).detach(), *(t.grad for t in tensors)])
    (y, dx, d_weight, d_bias), (true_y, true_dx, true_d_weight, true_d_bias) = results
    limit = 0.08 if grad_format == "e5m2" else 0.01
    assert 0.01 < error(y, true_y) < 0.04
    assert error(dx, true_dx) < limit
    assert error(d_weight, true_d_weight) < limit
    assert error(d_bias, true_d_bias) < 0.005


def test_row_scaling_handles_rows_of_very_different_size() -> None:
    x, weight = random(64, 128, dtype=torch.float32), random(64, 128, seed=1, dtype=torch.float32)
    x[:4] *= 1e5
    weight[:4] *= 1e5
    exact = F.linear(x, weight)[4:, 4:]
    by_tensor, per_row = (
        error(fp8_linear_reference(x, weight, None, Fp8Options(scaling))[4:, 4:], exact)
        for scaling in ("tensor", "row")
    )
    assert per_row < 0.04 < 0.2 < by_tensor


@pairwise(scaling=SCALING)
def test_gradients_are_those_of_the_quantized_matrices(scaling: Any) -> None:
    """dx uses the quantized W, dW the quantized x, both the quantized dy, each scaled for its product."""
    x, weight, bias, dy = (random(*shape, dtype=torch.float32) for shape in ((33, 64), (48, 64), (48,), (33, 48)))
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = fp8_linear_reference(*leaves, Fp8Options(scaling))
    y.backward(dy)
    per_row = scaling == "row"
    (x_rows, x_columns), (w_rows, w_columns) = (quantized_views(t, E4M3, per_row) for t in (x, weight))
    dy_rows, dy_columns = quantized_views(dy, E5M2, per_row)
    twins = [t.requires_grad_() for t in (x_columns, w_columns)]
    dx, _ = torch.autograd.grad(F.linear(*twins), twins, dy_rows)
    _, d_weight = torch.autograd.grad(F.linear(*twins), twins, dy_columns)
    for actual, expected in (
        (y, F.linear(x_rows, w_rows, bias.double())),
        (leaves[0].grad, dx),
        (leaves[1].grad, d_weight),
    ):
        assert actual is not None
        assert error(actual, expected) < 1e-6
    assert leaves[2].grad is not None
    torch.testing.assert_close(leaves[2].grad, dy.sum(0))


@pairwise(function=FUNCTIONS, scaling=SCALING, value=[torch.inf, torch.nan])
def test_inf_and_nan_propagate(function: Linear, scaling: Any, value: float) -> None:
    x, weight = random(32, 64).requires_grad_(), random(48, 64).requires_grad_()
    bad_x = x.detach().clone()
    bad_x[3, 5] = value
    assert not function(bad_x, weight, None, Fp8Options(scaling))[3].isfinite().any()
    dy = random(32, 48)
    dy[3, 5] = value
    function(x, weight, None, Fp8Options(scaling)).backward(dy)
    assert x.grad is not None
    assert weight.grad is not None
    assert not x.grad[3].isfinite().any()
    assert not weight.grad[5].isfinite().any()


@pairwise(
    function=FUNCTIONS,
    grad_format=GRAD_FORMATS,
    needs_grad={"all": (1, 1, 1), "x": (1, 0, 0), "weight": (0, 1, 0), "bias": (0, 0, 1)},
)
def test_saves_and_computes_only_what_is_needed(
    function: Linear, grad_format: Any, needs_grad: tuple[int, int, int]
) -> None:
    """Saves one byte per element of x and nothing of the weight but itself, and computes only requested gradients."""
    tensors = [random(64, 128), random(32, 128), random(32)]
    for tensor, flag in zip(tensors, needs_grad, strict=True):
        tensor.requires_grad_(bool(flag))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = function(*tensors, Fp8Options("tensor", grad_format))
    size = sum(t.numel() * t.element_size() for t in saved if t.data_ptr() != tensors[1].data_ptr())
    assert size <= 64 * 128 * (1 if grad_format == "e5m2" else 2) * needs_grad[1] + 64
    y.sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == [bool(flag) for flag in needs_grad]


@each_value(
    function=FUNCTIONS,
    options=[Fp8Options("tensor", "e5m2"), Fp8Options("row", "e5m2", False), Fp8Options("tensor", "bf16")],
)
def test_compiled_equals_eager(function: Linear, options: Fp8Options) -> None:
    def run(step: Callable[..., Tensor]) -> list[Tensor]:
        x, weight, bias = (t.requires_grad_() for t in (random(2, 13, 64), random(32, 64), random(32)))
        y = step(x, weight, bias)
        y.backward(random(*y.shape, seed=1))
        with torch.no_grad():
            again = step(x, weight, bias)
        return [y.detach(), again, *(t.grad for t in (x, weight, bias) if t.grad is not None)]

    torch.compiler.reset()
    step = lambda x, weight, bias: function(x, weight, bias, options)  # noqa: E731
    for compiled, eager in zip(run(torch.compile(step, backend="aot_eager", fullgraph=True)), run(step), strict=True):
        assert torch.equal(compiled, eager)


@pairwise(function=FUNCTIONS)
def test_sizes_must_be_multiples_of_16(function: Linear) -> None:
    with pytest.raises(UserError, match=r"40 x 64 matrix: .* multiples of 16"):
        function(random(8, 64), random(40, 64), None, Fp8Options())


@pairwise(scaling=SCALING, grad_format=GRAD_FORMATS, has_bias=[True, False])
def test_output_projection_in_fp8(scaling: Any, grad_format: Any, has_bias: bool) -> None:
    """Loss and gradients are close to bf16, with the reference and with the device's own fp8 products."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((40, 32), (100, 32), (100,))  # a padded vocabulary
    hidden, weight, bias = (torch.randn(*size, generator=generator).to(DEVICE, torch.bfloat16) for size in sizes)
    labels = torch.randint(0, 100, (40,), generator=generator).to(DEVICE, torch.int32)
    labels[3] = IGNORE_INDEX

    def run(make_gemm: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, *([bias] if has_bias else []))]
        output = ModelOutput(leaves[0][None], leaves[1], leaves[2] if has_bias else None)
        loss = chunked_cross_entropy(output, labels, make_gemm=make_gemm, logits_bytes=4 * 100 * 16)
        loss.backward()
        return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    expected, options = run(HeadGemm), Fp8Options(scaling, grad_format)
    modes = [True] if DEVICE == "cpu" else [True, False]  # a CPU has no fp8 products
    for reference in modes:
        results = run(lambda weight, bias, mode=reference: Fp8HeadGemm(weight, bias, options, mode))
        for actual, bf16 in zip(results, expected, strict=True):
            error = (actual.float() - bf16.float()).norm() / bf16.float().norm()
            assert 0 < error < 0.1  # e5m2 alone rounds by 7%

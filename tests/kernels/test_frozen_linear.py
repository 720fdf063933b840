"""Linear layers with frozen matrices: each storage against F.linear of the values that it stands for, and the kernels
against plain torch, in Triton's interpreter on a CPU and compiled on a GPU."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.pairwise import each_value, pairwise
from trainyard.core.errors import UserError
from trainyard.kernels import frozen_linear as frozen
from trainyard.kernels.custom_op import WORKSPACE_BYTES
from trainyard.kernels.fp8_linear import Fp8Matrix, Fp8Options, compute_amax, fp8_linear, quantize
from trainyard.kernels.frozen_linear import FrozenMatrix, frozen_linear, quantize_frozen
from trainyard.kernels.nf4 import Nf4Matrix, dequantize_nf4, quantize_nf4
from trainyard.kernels.reference import Kernels
from trainyard.kernels.triton.ops import TritonKernels
from trainyard.preflight.plan.trace.work_trace import _WorkRecorder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SCALING = ["tensor", "row"]
GRAD_FORMATS = ["e5m2", "bf16"]
STORAGES = ["plain", "nf4", "fp8"]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
M, D, N = 37, 128, 96


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def store(storage: str, weight: Tensor, scaling: str = "tensor") -> FrozenMatrix:
    if storage == "plain":
        return weight
    return quantize_nf4(weight) if storage == "nf4" else quantize_frozen(weight, scaling)


def values_of(matrix: FrozenMatrix) -> Tensor:
    if isinstance(matrix, Nf4Matrix):
        return dequantize_nf4(matrix, torch.float32)
    if isinstance(matrix, Fp8Matrix):
        return matrix.values.float() * matrix.inverse_scale[:, None]
    return matrix.float()


def error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def forward_backward(function: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """y, dx and d_bias."""
    x, bias = random(2, M, D, dtype=dtype).requires_grad_(), random(N, dtype=dtype).requires_grad_()
    y = function(x, bias=bias)
    dx, d_bias = torch.autograd.grad(y, (x, bias), random(2, M, N, seed=1, dtype=dtype))
    return y.detach(), dx, d_bias


@pairwise(storage=["plain", "nf4"], dtype=DTYPES)
def test_results_are_those_of_the_stored_values(storage: str, dtype: torch.dtype) -> None:
    """Bit by bit: the matrix is dequantized to the dtype of x and multiplied as any other."""
    weight = random(N, D, dtype=dtype)
    matrix = store(storage, weight)
    twin = dequantize_nf4(matrix, dtype) if isinstance(matrix, Nf4Matrix) else weight
    expected = forward_backward(lambda x, bias: F.linear(x, twin, bias), dtype)
    actual = forward_backward(lambda x, bias: frozen_linear(x, matrix, bias, reference=True), dtype)
    for ours, theirs in zip(actual[:2], expected[:2], strict=True):
        assert torch.equal(ours, theirs)
    assert error(actual[2], expected[2]) < 1e-2


@pairwise(scaling=SCALING, grad_format=GRAD_FORMATS)
def test_stored_fp8(scaling: Any, grad_format: Any) -> None:
    """y from x in e4m3, dx from dy in e5m2 or as it is, both with the stored values of W."""
    weight = random(N, D, dtype=torch.float32) * torch.logspace(-2, 2, N, device=DEVICE)[:, None]
    matrix, fp8 = quantize_frozen(weight, scaling), Fp8Options(scaling, grad_format)
    values = values_of(matrix)
    assert matrix.values.element_size() == 1
    assert error(values, weight) < 0.03
    actual = forward_backward(lambda x, bias: frozen_linear(x, matrix, bias, fp8, reference=True), torch.float32)

    def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
        cast, _ = quantize(x, compute_amax(x, scaling == "row", reference=True), dtype, scaling == "row", True)
        return cast.values.float() * cast.inverse_scale[:, None]

    x, dy = (random(2, M, size, seed=seed, dtype=torch.float32).flatten(0, 1) for seed, size in ((0, D), (1, N)))
    y = F.linear(rounded(x, torch.float8_e4m3fn), values, random(N, dtype=torch.float32))
    assert error(actual[0].flatten(0, 1), y) < 1e-6
    if grad_format == "bf16":
        assert error(actual[1].flatten(0, 1), dy @ values) < 1e-6
    else:
        scaled_dy = dy * matrix.inverse_scale
        assert error(actual[1].flatten(0, 1), rounded(scaled_dy, torch.float8_e5m2) @ matrix.values.float()) < 1e-6
        assert 0.01 < error(actual[1].flatten(0, 1), dy @ values) < 0.08
    torch.testing.assert_close(actual[2], dy.sum(0))


@pairwise(scaling=SCALING)
def test_stored_fp8_forward_is_fp8_linear(scaling: Any) -> None:
    """Casting at load or at each use gives the same bits: one scale per tensor in both, or per row in both."""
    weight, fp8 = random(N, D), Fp8Options(scaling)
    dynamic = forward_backward(lambda x, bias: fp8_linear(x, weight, bias, fp8, reference=True), torch.bfloat16)
    stored = quantize_frozen(weight, scaling)
    actual = forward_backward(lambda x, bias: frozen_linear(x, stored, bias, fp8, reference=True), torch.bfloat16)
    assert torch.equal(actual[0], dynamic[0])
    assert scaling == "row" or torch.equal(actual[1], dynamic[1])


@pairwise(scaling=SCALING, columns=[False, True])
def test_shards_of_an_fp8_matrix(scaling: str, columns: bool) -> None:
    weight = random(N, D, dtype=torch.float32) * torch.logspace(-9, 9, D, device=DEVICE)
    full = quantize_frozen(weight, scaling)
    shards = weight.chunk(2, int(columns))
    amax = weight.abs().amax(1) if scaling == "row" else weight.abs().amax().view(1)
    for number, shard in enumerate(shards):
        own = amax if columns or scaling == "tensor" else amax.chunk(2)[number]
        matrix = quantize_frozen(shard, scaling, lambda part, own=own: torch.maximum(part, own))
        expected = full.values.chunk(2, int(columns))[number]
        assert torch.equal(matrix.values.view(torch.uint8), expected.contiguous().view(torch.uint8))


def test_fp8_needs_sizes_that_are_a_multiple_of_16() -> None:
    with pytest.raises(UserError, match="24 x 40"):
        quantize_frozen(random(24, 40), "row")


@pairwise(storage=STORAGES)
def test_neither_x_nor_a_dequantized_matrix_is_saved(storage: str) -> None:
    weight = random(N, D)
    matrix, saved = store(storage, weight), []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):  # type: ignore[arg-type,func-returns-value]
        frozen_linear(random(M, D).requires_grad_(), matrix, None, Fp8Options(), reference=True)
    tensors = (matrix,) if isinstance(matrix, Tensor) else matrix
    addresses = {tensor.data_ptr() for tensor in tensors}
    own = [tensor for tensor in saved if tensor.data_ptr() not in addresses]
    # A plain matrix is quantized again at each use, from its amax.
    assert sum(tensor.nbytes for tensor in own) <= (8 if storage == "plain" else 0)


@pairwise(storage=STORAGES)
def test_recomputed(storage: str) -> None:
    matrix, x = store(storage, random(N, D)), random(M, D).requires_grad_()

    def function(x: Tensor) -> Tensor:
        return frozen_linear(x.sin(), matrix, None, Fp8Options(), reference=True).cos()

    plain, again = function(x), checkpoint(function, x, use_reentrant=False)
    assert torch.equal(plain, again)
    expected, actual = (torch.autograd.grad(y.sum(), x)[0] for y in (plain, again))
    assert torch.equal(expected, actual)


@pytest.mark.nightly
@pairwise(storage=STORAGES)
def test_compiled(storage: str) -> None:
    matrix, x = store(storage, random(N, D)), random(M, D).requires_grad_()
    compiled = torch.compile(frozen_linear, fullgraph=True)
    results = []
    for function in (frozen_linear, compiled):
        y = function(x, matrix, None, Fp8Options(), reference=True)
        results.append((y.detach(), *torch.autograd.grad(y.float().square().sum(), x)))
    for expected, actual in zip(*results, strict=True):
        assert error(actual, expected) < 5e-3


# Kernels against plain torch.


@needs_triton
@each_value(storage=STORAGES, scaling=SCALING, grad_format=GRAD_FORMATS)
def test_kernels(storage: str, scaling: Any, grad_format: Any) -> None:
    matrix, fp8 = store(storage, random(N, D), scaling), Fp8Options(scaling, grad_format)
    expected, actual = (
        forward_backward(partial(kernels.frozen_linear, weight=matrix, fp8=fp8), torch.bfloat16)
        for kernels in (Kernels(), TritonKernels())
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype == torch.bfloat16
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs) if storage == "nf4" and DEVICE == "cpu" else error(ours, theirs) < 1e-2


@needs_triton
@pairwise(shape=[(16, 48), (144, 272)])
def test_transpose(shape: tuple[int, int]) -> None:
    from trainyard.kernels.triton.fp8_cast import transpose

    values = (torch.arange(shape[0] * shape[1], device=DEVICE) * 37 % 256).to(torch.uint8).view(shape)
    actual = transpose(values.view(torch.float8_e4m3fn))
    assert torch.equal(actual.view(torch.uint8), values.t())


@needs_triton
def test_opcheck_fake_tensors() -> None:
    tests = "test_faketensor"
    x, dy, nf4, fp8 = random(32, D), random(32, N), quantize_nf4(random(N, D)), quantize_frozen(random(N, D), "tensor")
    dy_fp8, _ = quantize(dy, compute_amax(dy, False, reference=True), torch.float8_e5m2, False, reference=True)
    for reference in (False, True):
        torch.library.opcheck(frozen.nf4_matmul, (x, *nf4, random(N), False, reference), test_utils=tests)
        torch.library.opcheck(frozen.nf4_matmul, (dy, *nf4, None, True, reference), test_utils=tests)
        torch.library.opcheck(frozen.fp8_dgrad, (*dy_fp8, *fp8, torch.bfloat16, reference), test_utils=tests)
    torch.library.opcheck(frozen.cast_matmul, (dy, fp8.values), test_utils=tests)


# What a plan counts.


@pairwise(storage=["nf4", "fp8"], grad_format=GRAD_FORMATS)
def test_planned_work(storage: str, grad_format: Any) -> None:
    """Operations of a GEMM forward and one backward; the scratch buffer as memory and as traffic."""
    matrix = store(storage, random(N, D))
    matrix = type(matrix)(*(tensor.to("meta") for tensor in matrix))
    recorder = _WorkRecorder(1)
    recorder.parts, recorder.first_nodes = [0], [0]
    gemm = 2 * 48 * D * N
    x = torch.empty(48, D, dtype=torch.bfloat16, device="meta", requires_grad=True)
    dy = torch.empty(48, N, dtype=torch.bfloat16, device="meta")
    with recorder:
        y = frozen_linear(x, matrix, None, Fp8Options(grad_format=grad_format))
        forward = recorder.work[0].moved_bytes
        torch.autograd.grad(y, x, dy)
    work = recorder.work[0]
    if storage == "nf4":
        assert (work.matmul_flops, work.fp8_flops) == (2 * gemm, 0)
        assert forward == N * D // 2 + 2 * N * D
        assert work.moved_bytes == 2 * forward
        arguments = (x, *matrix, None, False, False)
        assert WORKSPACE_BYTES[torch.ops.trainyard.nf4_matmul.default](*arguments) == 2 * N * D
    else:
        in_bf16 = gemm if grad_format == "bf16" else 0
        assert (work.matmul_flops, work.fp8_flops) == (in_bf16, 2 * gemm - in_bf16)
        assert work.moved_bytes - forward > (3 if in_bf16 else 2) * N * D

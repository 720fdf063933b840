"""A linear layer in fp32 of bf16 tensors: the values of fp32 matrices, forward and backward."""

import torch

from trainyard.kernels.reference import Kernels
from trainyard.kernels.triton.ops import TritonKernels


def test_equals_a_linear_layer_of_fp32_matrices() -> None:
    x = torch.randn(2, 40, 96).bfloat16().requires_grad_()
    weight, bias = torch.randn(16, 96).bfloat16().requires_grad_(), torch.randn(16).bfloat16().requires_grad_()
    dy = torch.randn(2, 40, 16)
    outputs = [kernels.fp32_linear(x, weight, bias) for kernels in (Kernels(), TritonKernels())]
    assert all(y.dtype == torch.float32 for y in outputs)
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=1e-5)
    expected, actual = (torch.autograd.grad(y, (x, weight, bias), dy) for y in outputs)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=2**-7)  # a rounding may fall to the other side
    assert sum(int((a != b).sum()) for a, b in zip(actual, expected, strict=True)) < 60


def test_a_gradient_keeps_what_bf16_would_round() -> None:
    """The gradient of the weight sums 1 + 2^-12 over tokens, which is 1 in bf16."""
    x, weight = torch.ones(1, 4096, 8).bfloat16(), torch.zeros(8, 8).bfloat16().requires_grad_()
    y = TritonKernels().fp32_linear(x, weight, None)
    dy = torch.full_like(y, 1.0)
    dy[:, ::2] = -1.0 - 2**-12
    (gradient,) = torch.autograd.grad(y, weight, dy)
    assert torch.equal(gradient, torch.full((8, 8), -0.5).bfloat16())


def test_fp32_parameters_take_the_plain_path() -> None:
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(4, 8)
    torch.testing.assert_close(TritonKernels().fp32_linear(x, weight, None), x.float() @ weight.T)

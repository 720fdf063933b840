"""Linear layers and the activations between the two matrices of an MLP."""

from torch import Tensor, nn

from trainyard.kernels.fp8_linear import Fp8Options
from trainyard.kernels.reference import Kernels
from trainyard.parallel.recompute import Recomputable


class Linear(nn.Module):
    """y = x W^T + b with this rank's shard of the weight, through the device's kernels and optionally in fp8."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, kernels: Kernels, fp8: Fp8Options | None = None
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.kernels, self.fp8 = kernels, fp8

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.weight, self.bias, self.fp8)

    def matmul(self, x: Tensor) -> Tensor:
        """The product without the bias: tensor parallelism first reduces a row-parallel product over ranks."""
        return self.kernels.linear(x, self.weight, None, self.fp8)


class BiasGelu(Recomputable):
    """GELU(x + bias), where the bias belongs to the first matrix of the MLP."""

    recompute_name = "activation"

    def __init__(self, kind: str, kernels: Kernels) -> None:
        super().__init__()
        self.tanh, self.kernels = kind == "gelu_tanh", kernels

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.kernels.bias_gelu(x, bias, self.tanh)


class SwiGLU(Recomputable):
    """silu(gate) * up on the two halves of each row."""

    recompute_name = "activation"

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(self, gate_up: Tensor) -> Tensor:
        return self.kernels.swiglu(gate_up)

"""The activations between the two matrices of an MLP."""

from torch import Tensor

from trainyard.kernels.reference import Kernels
from trainyard.parallel.recompute import Recomputable


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

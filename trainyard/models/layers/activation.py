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
        self.saves_inputs_only = kernels.fused_wgrad

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.kernels.bias_gelu(x, bias, self.tanh)
        return self.drop_output(y, lambda: self.kernels.bias_gelu(x, bias, self.tanh))


class SwiGLU(Recomputable):
    """silu(gate) * up on the two halves of each row."""

    recompute_name = "activation"

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.saves_inputs_only = kernels.fused_wgrad

    def forward(self, gate_up: Tensor) -> Tensor:
        y = self.kernels.swiglu(gate_up)
        return self.drop_output(y, lambda: self.kernels.swiglu(gate_up))


class ClampedSwiGLU(Recomputable):
    """SwiGLU with clamped inputs and one added to `up` (gpt-oss)."""

    recompute_name = "activation"

    def __init__(self, alpha: float, limit: float, kernels: Kernels) -> None:
        super().__init__()
        self.alpha, self.limit, self.kernels = alpha, limit, kernels

    def forward(self, gate_up: Tensor) -> Tensor:
        return self.kernels.clamped_swiglu(gate_up, self.alpha, self.limit)

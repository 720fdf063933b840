"""The activations between the two matrices of an MLP."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from trainyard.families.decoder import GateActivation
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


class GatedActivation(Recomputable):
    """activation(gate) * up on the two halves of each row."""

    recompute_name = "activation"

    def __init__(self, kind: GateActivation, kernels: Kernels) -> None:
        super().__init__()
        self.compute = kernels.swiglu if kind == "silu" else partial(gated_gelu, tanh=kind == "gelu_tanh")
        self.saves_inputs_only = kernels.fused_wgrad and kind == "silu"

    def forward(self, gate_up: Tensor) -> Tensor:
        y = self.compute(gate_up)
        return self.drop_output(y, lambda: self.compute(gate_up))


class ClampedSwiGLU(Recomputable):
    """SwiGLU with clamped inputs and one added to `up` (gpt-oss)."""

    recompute_name = "activation"

    def __init__(self, alpha: float, limit: float, kernels: Kernels) -> None:
        super().__init__()
        self.alpha, self.limit, self.kernels = alpha, limit, kernels

    def forward(self, gate_up: Tensor) -> Tensor:
        return self.kernels.clamped_swiglu(gate_up, self.alpha, self.limit)


def gated_gelu(gate_up: Tensor, tanh: bool) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh" if tanh else "none") * up

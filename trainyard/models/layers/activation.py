"""The activations between the two matrices of an MLP."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from trainyard.families.decoder import Activation
from trainyard.kernels.reference import Kernels
from trainyard.parallel.recompute import Recomputable


class BiasActivation(Recomputable):
    """activation(x + bias), where the bias belongs to the first matrix of the MLP."""

    recompute_name = "activation"

    def __init__(self, kind: Activation, kernels: Kernels) -> None:
        super().__init__()
        is_gelu = kind in ("gelu", "gelu_tanh")
        self.compute = (
            partial(kernels.bias_gelu, tanh=kind == "gelu_tanh") if is_gelu else partial(biased, kernels, kind)
        )
        self.saves_inputs_only = kernels.fused_wgrad and is_gelu

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.compute(x, bias)
        return self.drop_output(y, lambda: self.compute(x, bias))


class MlpActivation(Recomputable):
    """activation(gate) * up on the two halves of each row, or activation(x) in an MLP without a gate."""

    recompute_name = "activation"

    def __init__(self, kind: Activation, kernels: Kernels, gated: bool = True) -> None:
        super().__init__()
        self.compute: Callable[[Tensor], Tensor] = partial(kernels.activate, kind)
        self.saves_inputs_only = not kind.startswith("relu")
        if gated:
            self.compute = kernels.swiglu if kind == "silu" else partial(gated_by, kernels, kind)
            self.saves_inputs_only = kernels.fused_wgrad and kind == "silu"

    def forward(self, x: Tensor) -> Tensor:
        y = self.compute(x)
        return self.drop_output(y, lambda: self.compute(x))


class ClampedSwiGLU(Recomputable):
    """SwiGLU with clamped inputs and one added to `up` (gpt-oss)."""

    recompute_name = "activation"

    def __init__(self, alpha: float, limit: float, kernels: Kernels) -> None:
        super().__init__()
        self.alpha, self.limit, self.kernels = alpha, limit, kernels

    def forward(self, gate_up: Tensor) -> Tensor:
        return self.kernels.clamped_swiglu(gate_up, self.alpha, self.limit)


def biased(kernels: Kernels, kind: Activation, x: Tensor, bias: Tensor) -> Tensor:
    return kernels.activate(kind, x + bias)


def gated_by(kernels: Kernels, kind: Activation, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return kernels.activate(kind, gate) * up

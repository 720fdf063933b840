"""The experts of a layer: matrices of equal shape, which multiply rows that are sorted by expert or in slots.

N rows, E experts of this expert-parallel rank, S slots of an expert, D hidden.
"""

from collections.abc import Callable

from torch import Tensor, nn

from trainyard.families.moe import MoeConfig
from trainyard.kernels.grouped_linear import add_grouped_bias, grouped_linear
from trainyard.models.layers import ClampedSwiGLU, MlpActivation
from trainyard.models.lora import add_expert_adapters
from trainyard.models.module_factory import ModuleFactory


class Experts(nn.Module):
    """A tensor-parallel rank has some columns of all experts of its expert-parallel rank."""

    def __init__(self, c: MoeConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.tp_size, self.local = make.tp.size, c.experts // make.ep.size
        self.gate_up, self.down = (make.parameter(f"{name}.{matrix}") for matrix in ("gate_up", "down"))
        self.gate_up_bias, self.down_bias = (
            make.optional_parameter(f"{name}.{matrix}_bias") for matrix in ("gate_up", "down")
        )
        self.update_scale = add_expert_adapters(self, ("gate_up", "down"), make, name)
        self.activation: nn.Module = MlpActivation(c.style.activation, make.kernels)
        if c.moe_style.clamped_swiglu:
            self.activation = ClampedSwiGLU(*c.moe_style.clamped_swiglu, make.kernels)

    def forward(self, rows_ND: Tensor, ends_E: Tensor) -> Tensor:
        """Rows sorted by expert; those of expert e end at ends[e]."""
        return self._multiply(
            rows_ND,
            lambda x, matrices: grouped_linear(x, matrices, ends_E),
            lambda y, bias_EO: add_grouped_bias(y, bias_EO, ends_E),
        )

    def in_slots(self, x_ESD: Tensor) -> Tensor:
        return self._multiply(x_ESD, lambda x, matrices: x @ matrices.mT, lambda y, bias_EO: y + bias_EO[:, None])

    def _multiply(
        self, x: Tensor, multiply: Callable[[Tensor, Tensor], Tensor], add: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        def linear(x: Tensor, name: str) -> Tensor:
            """x times the matrices of experts, plus the update of their adapters if they have any."""
            y = multiply(x, self._matrices(name, x))
            if not self.update_scale:
                return y
            # The scale is multiplied where the matrix is small.
            h = multiply(x, self._matrices(f"{name}_lora_A", x)) * self.update_scale
            return y + multiply(h, self._matrices(f"{name}_lora_B", h))

        gate_up = linear(x, "gate_up")
        if self.gate_up_bias is not None:
            gate_up = add(gate_up, self.gate_up_bias.view(self.local, -1))
        y = linear(self.activation(gate_up), "down")
        if self.down_bias is not None:  # tensor-parallel ranks sum their results
            y = add(y, self.down_bias.view(self.local, -1) / self.tp_size)
        return y

    def _matrices(self, name: str, x: Tensor) -> Tensor:
        matrices: Tensor = getattr(self, name)
        return matrices.view(self.local, -1, x.shape[-1])

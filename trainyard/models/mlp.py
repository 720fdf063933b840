"""The MLP of Llama's block, and the choice between it and a mixture of experts."""

import torch
from torch import Tensor

from trainyard.families.decoder import DecoderConfig
from trainyard.families.moe import MoeConfig
from trainyard.models.layers import Linear, MlpActivation
from trainyard.models.module_factory import ModuleFactory
from trainyard.models.moe import MoeMLP
from trainyard.parallel.recompute import Recomputable
from trainyard.parallel.tensor_parallel import TensorAxis


class LlamaMLP(Recomputable):
    recompute_name = "mlp"

    def __init__(self, c: DecoderConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.tp = make.tp
        parts = (["gate_up"] if c.fuse_gate_up else ["gate", "up"]) if c.style.gated else ["up"]
        self.up_linears = make.linears(self, name, parts)
        self.activation = MlpActivation(c.style.activation, make.kernels, c.style.gated)
        self.down = make.linear(f"{name}.down")

    def forward(self, x_BTD: Tensor) -> Tensor:
        projections = self.tp.column_parallel(x_BTD, *self.up_linears, keep_gathered=self.keep_gathered)
        y_BTF = projections[0] if len(projections) == 1 else torch.cat(projections, -1)
        return reduce_output(self.tp, self.down, self.activation(y_BTF))


def reduce_output(tp: TensorAxis, linear: Linear, x: Tensor) -> Tensor:
    """A row-parallel layer: all ranks' sum, and its bias once."""
    if linear.bias is None:
        return tp.reduce_output(linear(x))
    return tp.reduce_output(linear.matmul(x)) + linear.bias


def make_mlp(c: DecoderConfig, make: ModuleFactory, name: str) -> LlamaMLP | MoeMLP:
    """The MLP or the mixture of experts of a block, whichever the blueprint has."""
    if not isinstance(c, MoeConfig) or f"{name}.router.weight" not in make.blueprint:
        return LlamaMLP(c, make, name)
    shared = LlamaMLP(c, make, f"{name}.shared") if c.shared_ffn else None
    if shared:
        shared.tp = TensorAxis()  # the mixture gathers its input and reduces its output
    return MoeMLP(c, make, name, shared)

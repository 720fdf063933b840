"""Norms, most of them fused with the residual sum before them.

B batch, T tokens, Q width of all heads on a rank.
"""

from torch import Tensor, nn

from trainyard.core.counter_rng import RowSeeds
from trainyard.kernels.reference import Kernels
from trainyard.models.layers.dropout import Dropout
from trainyard.parallel.recompute import Recomputable
from trainyard.parallel.tensor_parallel import TensorAxis


class RMSNorm(Recomputable):
    """RMSNorm of x, or of the residual sum x + y."""

    recompute_name = "norm"
    weight: Tensor

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels, plus_one: bool = False) -> None:
        """`weight` is a parameter, or constant. `plus_one`: the factor is 1 + weight."""
        super().__init__()
        if isinstance(weight, nn.Parameter):
            self.weight = weight
        else:
            self.register_buffer("weight", weight, persistent=False)
        self.eps, self.plus_one = eps, plus_one
        self.kernels = kernels
        self.saves_inputs_only = kernels.fused_wgrad

    @property
    def factor(self) -> Tensor:
        """In fp32 if it is 1 + weight, whose sum bf16 would round."""
        return 1 + self.weight.float() if self.plus_one else self.weight

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(residual, normed), where residual = x + y is the input of the next residual sum."""
        residual, normed = self.kernels.add_rms_norm(x, y, self.factor, self.eps)
        self.drop_output(normed, lambda: self.kernels.add_rms_norm(residual, None, self.factor, self.eps)[1])
        return residual, normed


class RMSNormOfAllHeads(nn.Module):
    """RMSNorm of the queries or keys of all heads, of which tensor-parallel ranks hold some each."""

    def __init__(self, weight: nn.Parameter, eps: float, tp: TensorAxis, width: int, copies: int) -> None:
        """`width` of all heads, each of which `copies` ranks hold."""
        super().__init__()
        self.weight, self.eps, self.tp = weight, eps, tp
        self.count = width * copies

    def forward(self, x_BTQ: Tensor) -> Tensor:
        squares = self.tp.sum(x_BTQ.float().square().sum(-1, keepdim=True))
        return (x_BTQ * (squares / self.count + self.eps).rsqrt() * self.weight).to(x_BTQ.dtype)


class ResidualSum(nn.Module):
    """In the place of a norm that a block does not have: the residual sum x + y, twice."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = x if y is None else x + y
        return x, x


class LayerNorm(Recomputable):
    """LayerNorm of x, or of the residual sum x + dropout(y + y_bias)."""

    recompute_name = "norm"

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, eps: float, kernels: Kernels, post_norm: bool = False
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.eps, self.kernels, self.post_norm = eps, kernels, post_norm
        self.saves_inputs_only = kernels.fused_wgrad

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        y_bias: Tensor | None = None,
        dropout: Dropout | None = None,
        seeds: RowSeeds | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(residual, normed). Pre-norm: residual = x + dropout(y + y_bias). Post-norm: residual = normed. Returning
        both lets the backward kernel add the two gradients."""
        rng = dropout.rng(seeds) if dropout and seeds else None
        parameters = (self.weight, self.bias, self.eps)
        residual, normed = self.kernels.add_layer_norm(x, y, y_bias, *parameters, rng, self.post_norm)
        if not self.post_norm:  # whose residual is the normed tensor itself
            self.drop_output(normed, lambda: self.kernels.add_layer_norm(residual, None, None, *parameters, None)[1])
        return residual, normed

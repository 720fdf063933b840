"""Norms fused with the residual sum before them."""

from torch import Tensor, nn

from trainyard.core.counter_rng import RowSeeds
from trainyard.kernels.reference import Kernels
from trainyard.models.layers.dropout import Dropout
from trainyard.parallel.recompute import Recomputable


class RMSNorm(Recomputable):
    """RMSNorm of x, or of the residual sum x + y."""

    recompute_name = "norm"

    def __init__(self, weight: nn.Parameter, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(residual, normed), where residual = x + y is the input of the next residual sum."""
        return self.kernels.add_rms_norm(x, y, self.weight, self.eps)


class LayerNorm(Recomputable):
    """LayerNorm of x, or of the residual sum x + dropout(y + y_bias)."""

    recompute_name = "norm"

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter, eps: float, kernels: Kernels, post_norm: bool = False
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.eps, self.kernels, self.post_norm = eps, kernels, post_norm

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
        return self.kernels.add_layer_norm(x, y, y_bias, self.weight, self.bias, self.eps, rng, self.post_norm)

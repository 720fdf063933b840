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
        self.saves_inputs_only = kernels.fused_wgrad

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(residual, normed), where residual = x + y is the input of the next residual sum."""
        residual, normed = self.kernels.add_rms_norm(x, y, self.weight, self.eps)
        self.drop_output(normed, lambda: self.kernels.add_rms_norm(residual, None, self.weight, self.eps)[1])
        return residual, normed


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

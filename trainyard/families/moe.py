"""What mixtures of experts have in common: keys, and the parameters of a layer's router and experts."""

from collections.abc import Collection, Hashable, Iterable
from dataclasses import replace
from typing import Self

from pydantic import Field, model_validator

from trainyard.core.section import PositiveInt
from trainyard.families.blueprint import Blueprint, FusedPart, ParamSpec, for_layers
from trainyard.families.decoder import DecoderConfig, decoder_blueprint


class MoeConfig(DecoderConfig):
    """A decoder with a mixture of experts in each layer (a family may have some without). `ffn` is the intermediate
    size of one expert."""

    experts: PositiveInt
    """Number of experts in each layer."""
    top_k: PositiveInt
    """Experts that a token goes to."""
    normalize_top_k: bool = True
    """Scale the weights of a token's experts to the sum 1."""
    capacity_factor: float | None = Field(None, gt=0)
    """Limit on the tokens that an expert takes of each sample in training, as a multiple of an equal share: later
    tokens skip it. With a limit all shapes are static, which Trainium needs. Default: no limit."""
    balance_loss: float = Field(0.01, ge=0)
    """Coefficient of the load-balancing loss, a mean over samples and layers (router_aux_loss_coef of transformers);
    0: none. It is not part of the logged loss."""
    z_loss: float = Field(0.0, ge=0)
    """Coefficient of the router's z loss (the squared logsumexp of its logits), a mean over tokens and a sum over
    layers; 0: none."""
    router_bias: bool = False
    """Balance the experts with a bias instead of a loss: it is added to the router's probabilities where experts are
    chosen, not to their weights, and moves against the load after each step. Only native checkpoints hold it."""
    bias_update_rate: float = Field(0.001, gt=0)
    """Step of the bias: that of an expert with more than its share of the tokens falls by this much, others rise."""

    @property
    def has_static_shapes(self) -> bool:
        return self.capacity_factor is not None

    @property
    def expert_layers(self) -> Collection[int]:
        """The layers with a mixture of experts."""
        return range(self.layers)

    def layer_kind(self, layer: int) -> Hashable:
        return layer in self.expert_layers, super().layer_kind(layer)

    @model_validator(mode="after")
    def _check_top_k(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k}: more than experts={self.experts}; nearest: {self.experts}")
        return self


def moe_blueprint(c: MoeConfig, dense_mlp_specs: Iterable[ParamSpec] = ()) -> Blueprint:
    """The parameters of a decoder with a mixture of experts; `dense_mlp_specs` are those of the layers without."""
    layer, expert = "layers.*.mlp.", "layers.*.mlp.experts."
    names = [f"{expert}{index}.{name}.weight" for index in range(c.experts) for name in ("gate", "up")]
    gate_up = tuple(FusedPart(name, c.ffn, c.ffn) for name in names)
    down = tuple(FusedPart(f"{expert}{index}.down.weight", c.hidden, c.hidden) for index in range(c.experts))

    def matrix(name: str, shape: tuple[int, int], tp_dim: int | None, init_std: float) -> ParamSpec:
        return ParamSpec(name, shape, tp_dim, init_std=init_std, flops_tokens="tokens")

    router = matrix(f"{layer}router.weight", (c.experts, c.hidden), None, c.init_std)
    experts = (
        replace(matrix(f"{expert}gate_up", (2 * c.experts * c.ffn, c.hidden), 0, c.init_std), fused_parts=gate_up),
        replace(matrix(f"{expert}down", (c.experts * c.hidden, c.ffn), 1, c.output_init_std), fused_parts=down),
    )
    bias = ParamSpec(f"{layer}router.bias", (c.experts,), tp_gradient="equal", load_step=c.bias_update_rate)
    mlp = (
        replace(router, tp_gradient="partial"),  # of a rank's part of the experts' outputs
        *([bias] if c.router_bias else []),
        *(replace(spec, experts=c.experts, active_experts=c.top_k) for spec in experts),
    )
    dense_layers = set(range(c.layers)).difference(c.expert_layers)
    mlp_specs = [*for_layers(dense_layers, dense_mlp_specs), *for_layers(c.expert_layers, mlp)]
    return decoder_blueprint(c, mlp_specs)


def moe_layer_names(c: MoeConfig) -> dict[str, str]:
    """Our names in a layer's mixture of experts, by expert and matrix (`0.gate`)."""
    return {
        f"{index}.{name}": f"layers.*.mlp.experts.{index}.{name}.weight"
        for index in range(c.experts)
        for name in ("gate", "up", "down")
    }

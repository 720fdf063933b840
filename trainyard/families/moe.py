"""What mixtures of experts have in common: keys, the parameters of a layer's router and experts, and their names in
Hugging Face's files."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from trainyard.core.section import PositiveInt, nearest_divisor
from trainyard.families.blueprint import Blueprint, FusedPart, ParamSpec, for_layers, layers_text, parse_layers
from trainyard.families.decoder import DecoderConfig, HfKeyGroup, decoder_blueprint, gated_mlp_specs
from trainyard.families.family import HfTensor

LAYER = "layers.*.mlp."
LayerNames = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
"""What `parse_layers` reads; a number is the index of a layer."""
SIGMOID_EPSILON = 1e-20
"""What transformers adds to the sum of a token's sigmoids before it divides by the sum."""


@dataclass(frozen=True)
class MoeStyle:
    """How a family's mixtures of experts differ from Mixtral's."""

    shared_gate: bool = False
    """Each token weights the shared expert by a sigmoid of its own."""
    logit_bias: bool = False
    """The logits of the router have a trained bias."""
    expert_biases: bool = False
    """Both matrices of an expert have a bias."""
    scales_inputs: bool = False
    """The weight of an expert is multiplied into its input instead of its output."""
    clamped_swiglu: tuple[float, float] | None = None
    """(alpha, limit) of gpt-oss's activation of the experts."""
    stores_router_bias: bool = False
    """Other stacks' files of this family hold `router_bias`, too."""


class MoeConfig(DecoderConfig):
    """A decoder with a mixture of experts in each layer, or in some. `ffn` is the intermediate size of one expert."""

    experts: PositiveInt
    """Number of experts in each layer."""
    top_k: PositiveInt
    """Experts that a token goes to."""
    normalize_top_k: bool = True
    """Scale the weights of a token's experts to the sum 1. Of a softmax, this is the softmax of the chosen logits."""
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the logits of the router become the scores by which experts are chosen and weighted."""
    routed_scale: float = Field(1.0, gt=0)
    """The weights of a token's experts are multiplied by this."""
    expert_groups: PositiveInt = 1
    """Number of groups of experts; a token chooses groups first, and then experts in them. 1: no groups."""
    top_k_groups: PositiveInt = 1
    """Groups that a token chooses."""
    group_score: Literal["max", "top2"] = "top2"
    """What a token chooses groups by: the largest score in it, or the sum of the two largest."""
    shared_ffn: PositiveInt | None = None
    """Intermediate size of the shared expert, an MLP that every token goes through as well. Default: none."""
    dense_layers: LayerNames | None = None
    """Layers with an MLP instead of experts, such as 0-2, 3-, even, odd or 0,5-7. Default: none."""
    dense_ffn: PositiveInt | None = None
    """Intermediate size of the MLP of those layers. Default: ffn."""
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
    """Balance the experts with a bias instead of a loss: it is added to the router's scores where experts are chosen,
    not to their weights, and moves against the load after each step."""
    bias_update_rate: float = Field(0.001, gt=0)
    """Step of the bias: that of an expert with more than its share of the tokens falls by this much, others rise."""

    @property
    def moe_style(self) -> MoeStyle:
        """How this family's mixtures of experts differ from Mixtral's."""
        return MoeStyle()

    @property
    def weight_epsilon(self) -> float:
        """Added to the sum by which `normalize_top_k` divides."""
        return SIGMOID_EPSILON if self.router_scores == "sigmoid" else 0.0

    @property
    def has_static_shapes(self) -> bool:
        return self.capacity_factor is not None

    @property
    def expert_layers(self) -> Collection[int]:
        """The layers with a mixture of experts."""
        dense = parse_layers(self.dense_layers, self.layers) if self.dense_layers else ()
        return set(range(self.layers)).difference(dense)

    @property
    def ffn_sizes(self) -> dict[str, int]:
        sizes = {"ffn": self.ffn, "shared_ffn": self.shared_ffn}
        sizes |= {"dense_ffn": self.dense_ffn or self.ffn} if self.dense_layers else {}
        return {key: size for key, size in sizes.items() if size}

    def layer_kind(self, layer: int) -> Hashable:
        return layer in self.expert_layers, super().layer_kind(layer)

    @model_validator(mode="after")
    def _check_router(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k}: more than experts={self.experts}; nearest: {self.experts}")
        if self.experts % self.expert_groups:
            nearest = nearest_divisor(self.expert_groups, self.experts)
            raise ValueError(
                f"expert_groups={self.expert_groups}: does not divide experts={self.experts}; nearest: {nearest}"
            )
        of_group, groups = self.experts // self.expert_groups, self.expert_groups
        if groups > 1 and not -(-self.top_k // of_group) <= self.top_k_groups <= groups:
            nearest = groups if self.top_k_groups > groups else -(-self.top_k // of_group)
            raise ValueError(
                f"top_k_groups={self.top_k_groups}: top_k={self.top_k} experts must be in {groups} groups of "
                f"{of_group}; nearest: {nearest}"
            )
        if groups > 1 and self.group_score == "top2" and of_group == 1:
            raise ValueError("group_score=top2: a group has one expert; nearest: max")
        assert self.expert_layers is not None  # reads `dense_layers`
        return self


def moe_blueprint(c: MoeConfig, dense_mlp_specs: Sequence[ParamSpec] = ()) -> Blueprint:
    """The parameters of a decoder with a mixture of experts."""
    return decoder_blueprint(c, moe_mlp_specs(c, dense_mlp_specs))


def moe_mlp_specs(c: MoeConfig, dense_mlp_specs: Sequence[ParamSpec] = ()) -> list[ParamSpec]:
    """The rows of the MLPs of all layers. `dense_mlp_specs` are those of the layers without experts, unless they have a
    gated MLP of `dense_ffn`."""
    style = c.moe_style

    def matrix(name: str, shape: tuple[int, int], init_std: float) -> ParamSpec:
        return ParamSpec(name, shape, init_std=init_std, flops_tokens="tokens")

    def experts(name: str, kind: str, parts: tuple[str, ...], size: int, columns: tuple[int, ...]) -> ParamSpec:
        """A parameter of all experts, fused of these parts of each."""
        names = [f"{LAYER}experts.{index}.{part}.{kind}" for index in range(c.experts) for part in parts]
        fused = tuple(FusedPart(name, size, size) for name in names)
        spec = ParamSpec(f"{LAYER}experts.{name}", (len(names) * size, *columns), fused_parts=fused)
        return replace(spec, experts=c.experts, active_experts=c.top_k)

    gate_up = experts("gate_up", "weight", ("gate", "up"), c.ffn, (c.hidden,))
    down = experts("down", "weight", ("down",), c.hidden, (c.ffn,))
    # Ranks add their parts of the experts' outputs, and so the gradients of what all of them hold.
    partial = [matrix(f"{LAYER}router.weight", (c.experts, c.hidden), c.init_std)]
    if style.logit_bias:
        partial.append(ParamSpec(f"{LAYER}router.logit_bias", (c.experts,)))
    if c.shared_ffn and style.shared_gate:
        partial.append(matrix(f"{LAYER}shared_gate.weight", (1, c.hidden), c.init_std))
    mlp = [
        *(replace(spec, tp_gradient="partial") for spec in partial),
        replace(gate_up, tp_dim=0, init_std=c.init_std, flops_tokens="tokens"),
        replace(down, tp_dim=1, init_std=c.output_init_std, flops_tokens="tokens"),
    ]
    if style.expert_biases:
        mlp.append(replace(experts("gate_up_bias", "bias", ("gate", "up"), c.ffn, ()), tp_dim=0))
        mlp.append(replace(experts("down_bias", "bias", ("down",), c.hidden, ()), tp_gradient="partial"))
    if c.router_bias:
        bias = ParamSpec(f"{LAYER}router.bias", (c.experts,), tp_gradient="equal", load_step=c.bias_update_rate)
        mlp.append(bias)
    if c.shared_ffn:
        shared = gated_mlp_specs(c, c.shared_ffn, f"{LAYER}shared.")
        mlp += [spec for spec in shared if spec.name.endswith("weight")]  # biases are those of dense layers
    dense_layers = set(range(c.layers)).difference(c.expert_layers)
    dense = dense_mlp_specs or gated_mlp_specs(c, c.dense_ffn or c.ffn)
    return [*for_layers(dense_layers, dense), *for_layers(c.expert_layers, mlp)]


def moe_layer_names(c: MoeConfig) -> dict[str, str]:
    """Our names in a layer's mixture of experts, by expert and matrix (`0.gate`)."""
    return {
        f"{index}.{name}": f"{LAYER}experts.{index}.{name}.weight"
        for index in range(c.experts)
        for name in ("gate", "up", "down")
    }


def moe_hf_names(c: MoeConfig, shared: str = "shared_expert") -> dict[str, HfTensor]:
    """The names that most families have for the MLPs of all layers; `shared` is that of the shared expert."""
    layer = "model.layers.*.mlp."
    matrices = {f"{LAYER}{at}{x}.weight": f"{at}{x}_proj" for at in ("", "shared.") for x in ("gate", "up", "down")}
    matrices |= {f"{LAYER}router.weight": "gate", f"{LAYER}shared_gate.weight": "shared_expert_gate"}
    matrices |= {ours: f"experts.{key}_proj" for key, ours in moe_layer_names(c).items()}
    return {ours: HfTensor(f"{layer}{name.replace('shared.', f'{shared}.')}.weight") for ours, name in matrices.items()}


def stacked_hf_names(
    c: MoeConfig, experts: str = "model.layers.*.mlp.experts.", interleaved: bool = False
) -> dict[str, HfTensor]:
    """The names of experts whose transposed matrices are stacked (Llama 4). `interleaved`: gate and up alternate
    (gpt-oss)."""
    kinds = ("weight", "bias") if c.moe_style.expert_biases else ("weight",)
    names = {}
    for index in range(c.experts):
        for part, matrix in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down")):
            for kind in kinds:
                tensor = f"{experts}{matrix}_proj" + "_bias" * (kind == "bias")
                alternates = interleaved and matrix == "gate_up"
                names[f"{LAYER}experts.{index}.{part}.{kind}"] = HfTensor(
                    tensor, kind == "weight", c.experts, alternates
                )
    return names


def sparse_layer_keys(default_ffn: int) -> HfKeyGroup:
    """The layers without experts, as the families of Qwen write them. `default_ffn` is the default of
    `intermediate_size`, the size of their MLP."""

    def read(data: Mapping[str, Any]) -> dict[str, Any]:
        step, named = data.get("decoder_sparse_step", 1), data.get("mlp_only_layers") or ()
        if step < 1:
            raise ValueError(f"decoder_sparse_step={step}: must be 1 or more; nearest: 1")
        layers = range(data["num_hidden_layers"])
        dense = layers_text(layer for layer in layers if layer in named or (layer + 1) % step)
        return {"dense_layers": dense, "dense_ffn": data.get("intermediate_size", default_ffn) if dense else None}

    def write(c: Any) -> dict[str, Any]:
        dense = sorted(set(range(c.layers)).difference(c.expert_layers))
        size = {"intermediate_size": c.dense_ffn or c.ffn} if dense else {}
        return {"mlp_only_layers": dense, "decoder_sparse_step": 1, **size}

    return HfKeyGroup(("mlp_only_layers", "decoder_sparse_step", "intermediate_size"), read, write)

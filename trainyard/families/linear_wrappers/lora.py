"""LoRA: low-rank updates of linear layers, trained while the model itself stays as it is.

A layer y = x W^T becomes y = x W^T + s (x A^T) B^T. A layer whose weight is fused of several parts (q, k and v) has one
A and one B for each part, as the modules of Hugging Face's PEFT: with a single A for all parts, their adapters could
not be read without averaging them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, model_validator

from trainyard.core.errors import UserError
from trainyard.core.section import ONE_OR_MORE, PositiveInt, Section
from trainyard.core.user_code import nearest_name
from trainyard.families.blueprint import SCORE_HEAD, Blueprint, FusedPart, ParamSpec
from trainyard.families.linear_wrapper import LinearWrapper

ALL_LINEAR, EXPERTS = "all-linear", "experts"
COLUMN_MULTIPLES = {"nf4": 64, "fp8": 16}
"""What each storage of a base needs of the columns of a matrix."""


class LoraKeys(Section):
    """Train low-rank adapters of the linear layers and keep the weights of the model as they are."""

    rank: PositiveInt = 16
    """Rank of the update of each matrix."""
    alpha: float = Field(32.0, gt=0)
    """The update is multiplied by alpha / rank."""
    rank_stabilized: bool = False
    """Multiply the update by alpha / sqrt(rank) instead (rsLoRA)."""
    targets: Annotated[tuple[str, ...], Strict(False), ONE_OR_MORE, Field(min_length=1)] = (ALL_LINEAR,)
    """The layers with an adapter: all-linear, or the last parts of their names in the parameter table, such as
    [q, v]; and experts, which all-linear does not include: an adapter of each matrix of each expert. Routers have
    none."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability with which an element of an adapter's input is dropped."""
    dora: bool = False
    """Also train the norm of each row of the updated matrix (DoRA)."""
    lr_ratio: float = Field(1.0, gt=0)
    """Learning rate of B as a multiple of optimizer.lr (LoRA+)."""
    base: Literal["nf4", "fp8"] | None = None
    """How the weights of the linear layers of blocks, which are not trained, are kept in memory: nf4 (QLoRA: 4.13 bits,
    multiplied in the compute dtype) or fp8 (e4m3, cast once and multiplied in fp8). Default: in the compute dtype."""
    train: Annotated[tuple[Literal["embedding", "norms", "head"], ...], Strict(False), ONE_OR_MORE] = ()
    """Parameters of the model to train as they are, besides the adapters: embedding, norms, head."""
    init_from: str | None = None
    """Initial values of the adapters and of what else it has: the folder of a PEFT adapter of the same rank, alpha and
    targets, or its name on the Hub. Default: an update of zero."""

    @model_validator(mode="after")
    def _check_targets(self) -> "LoraKeys":
        if ALL_LINEAR in self.targets and (others := set(self.targets) - {ALL_LINEAR, EXPERTS}):
            nearest = ", ".join(name for name in self.targets if name not in others)
            raise ValueError(f"targets={list(self.targets)}: {ALL_LINEAR} includes the others; nearest: [{nearest}]")
        if EXPERTS in self.targets and (self.dora or self.dropout):
            key, nearest = ("dora=true", "false") if self.dora else (f"dropout={self.dropout}", "0.0")
            raise ValueError(f"{key}: not with targets={EXPERTS}, where PEFT has none; nearest: {nearest}")
        return self

    @property
    def scale(self) -> float:
        """What the update is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


class Lora(LinearWrapper):
    """The adapters of linear layers."""

    keys = LoraKeys
    training_keys = frozenset({"dropout", "lr_ratio", "init_from"})
    module = "trainyard.models.lora:LoraLinear"

    def specs(self, options: Any, weight: ParamSpec) -> Sequence[ParamSpec]:
        parts = adapted_parts(options, weight)
        if not parts:
            return ()
        rank, base = options.rank, weight.name.removesuffix("weight")
        rows, columns = sum(part.size for part in parts), weight.shape[1]

        def renamed(suffix: str, size: int | None = None) -> tuple[FusedPart, ...]:
            names = (part.name.removesuffix("weight") + suffix for part in parts)
            return tuple(
                FusedPart(name, size or part.size, size or part.units) for name, part in zip(names, parts, strict=True)
            )

        # A column-parallel layer splits B and the norms by rows. Its A is whole on each rank, whose rows of B give it
        # a part of its gradient. A row-parallel layer splits A by columns, and each rank has a part of the gradient of
        # the rest: the matmul with B comes before the sum over ranks.
        is_fused, whole = bool(weight.fused_parts), {"tp_gradient": "partial"}
        a_split: dict[str, Any] = whole if weight.tp_dim == 0 else {"tp_dim": 1}
        split: dict[str, Any] = {"tp_dim": 0} if weight.tp_dim == 0 else whole
        added = [
            ParamSpec(
                f"{base}lora_A",
                (rank * len(parts), columns),
                fused_parts=renamed("lora_A", rank) if is_fused else (),
                init_std=(3 * columns) ** -0.5,  # that of PEFT's uniform values
                flops_tokens=weight.flops_tokens,
                **a_split,
            ),
            ParamSpec(
                f"{base}lora_B",
                (rows, rank),
                fused_parts=renamed("lora_B") if is_fused else (),
                init_std=0.0,  # a matrix, with weight decay; its values are 0
                flops_tokens=weight.flops_tokens,
                lr_scale=options.lr_ratio,
                **split,
            ),
        ]
        if options.dora:
            magnitudes = renamed("lora_magnitude") if is_fused else ()
            norms = ParamSpec(f"{base}lora_magnitude", (rows,), fused_parts=magnitudes, norms_of=weight.name, **split)
            added.append(norms)
        return added

    def check(self, options: Any, config: Any) -> None:
        layout, recompute, precision = config.layout, config.recompute, config.precision
        if layout.pp > 1 and options.dropout and set(recompute.modules) & {"attention", "mlp"}:
            # A linear layer knows the tokens of the latest micro batch; a recompute of a part of a block comes later.
            raise ValueError(
                f"recompute.modules={list(recompute.modules)}: with layout.pp={layout.pp} and lora.dropout, "
                "blocks are recomputed as a whole; nearest: recompute.kind=full"
            )
        if options.base == "nf4" and precision.kind == "fp8":
            raise ValueError("precision.kind=fp8: lora.base=nf4 multiplies in bf16; nearest: bf16, or lora.base=fp8")
        in_bf16 = precision.bf16_first_layers + precision.bf16_last_layers
        if options.base == "fp8" and in_bf16:
            raise ValueError(
                f"lora.base=fp8: in all layers, but precision.bf16_first_layers and bf16_last_layers keep {in_bf16} in "
                "bf16; nearest: 0 of them"
            )

    def extend(self, blueprint: Blueprint, options: Any) -> Blueprint:
        """The blueprint with adapters. Of the other parameters, only those that `train` names are trained."""
        adapted = with_expert_adapters(super().extend(blueprint, options), options)
        known = {layer_name(part) for spec in blueprint.specs if spec.is_linear for part in parts_of(spec)}
        known |= {EXPERTS for spec in blueprint.specs if spec.experts}
        for target in options.targets:
            if target not in {ALL_LINEAR, *known}:
                choices = (ALL_LINEAR, *sorted(known))
                raise UserError(
                    f"lora.targets={target}: not one of {', '.join(choices)}{nearest_name(target, choices)}"
                )

        own = set(blueprint.specs)

        def rows() -> Iterator[ParamSpec]:
            for spec in adapted.specs:
                is_frozen = spec in own and parameter_group(spec) not in (*options.train, "score")
                # A frozen router keeps its bias, too.
                yield replace(spec, trained=False, load_step=0.0, storage=storage(spec)) if is_frozen else spec

        def storage(spec: ParamSpec) -> Any:
            if not options.base or not spec.is_linear:
                return ""
            multiple = COLUMN_MULTIPLES[options.base]
            if spec.shape[1] % multiple:
                raise UserError(
                    f"lora.base={options.base}: {spec.name} has {spec.shape[1]} columns, not a multiple of {multiple}; "
                    "nearest: null"
                )
            return options.base

        return replace(adapted, specs=tuple(rows()))


def with_expert_adapters(blueprint: Blueprint, options: LoraKeys) -> Blueprint:
    """The blueprint with adapters of the matrices of experts, if these are a target.

    An expert has one A for its gate and up, unlike an MLP: PEFT adapts them as the one matrix that transformers has.
    """

    def rows() -> Iterator[ParamSpec]:
        for spec in blueprint.specs:
            yield spec
            if spec.experts and len(spec.shape) == 2 and EXPERTS in options.targets:
                yield from adapters(spec)

    def adapters(weight: ParamSpec) -> tuple[ParamSpec, ParamSpec]:
        rank, matrix = options.rank, weight.name.rpartition(".")[2]
        experts = dict.fromkeys(part.name.rsplit(".", 2)[0] for part in weight.fused_parts)
        a_parts = tuple(FusedPart(f"{expert}.{matrix}.lora_A", rank, rank) for expert in experts)
        b_parts = (replace(part, name=part.name.removesuffix("weight") + "lora_B") for part in weight.fused_parts)
        partial = replace(weight, tp_dim=None, tp_gradient="partial")
        # Split over ranks as the adapters of linear layers are (`Lora.specs`).
        a_split, b_split = (partial, weight) if weight.tp_dim == 0 else (weight, partial)
        a_shape, b_shape = (rank * weight.experts, weight.shape[1]), (weight.shape[0], rank)
        a = replace(a_split, name=f"{weight.name}_lora_A", shape=a_shape, fused_parts=a_parts)
        b = replace(b_split, name=f"{weight.name}_lora_B", shape=b_shape, fused_parts=tuple(b_parts))
        return replace(a, init_std=(3 * weight.shape[1]) ** -0.5), replace(b, init_std=0.0, lr_scale=options.lr_ratio)

    return replace(blueprint, specs=tuple(rows()))


def a_of_layers(blueprint: Blueprint) -> dict[str, str]:
    """The unfused A of each layer with an adapter, both by name; layers of an expert share one."""
    found: dict[str, str] = {}
    for name in blueprint.parameter_names():
        if name.endswith("lora_B"):
            a, b = (blueprint.local_slices(f"{name[:-1]}{letter}") for letter in "AB")
            found |= {piece.name.removesuffix(".lora_B"): a[i * len(a) // len(b)].name for i, piece in enumerate(b)}
    return found


def parts_of(weight: ParamSpec) -> tuple[FusedPart, ...]:
    """The parts of a weight; a weight that is not fused is its only part."""
    return weight.fused_parts or (FusedPart(weight.name, weight.shape[0], weight.shape[0]),)


def adapted_parts(options: LoraKeys, weight: ParamSpec) -> tuple[FusedPart, ...]:
    """The parts of the weight of a linear layer that have an adapter."""
    targets = options.targets
    return tuple(part for part in parts_of(weight) if ALL_LINEAR in targets or layer_name(part) in targets)


def layer_name(part: FusedPart) -> str:
    """`layers.*.attention.q.weight` -> `q`."""
    return part.name.split(".")[-2]


def parameter_group(spec: ParamSpec) -> str:
    """What `lora.train` calls a parameter: embedding, head or norms; empty for all others. The head of a reward model,
    which is new, is always trained: `score`."""
    if spec.name == SCORE_HEAD:
        return "score"
    if any(word.endswith("norm") for word in spec.name.split(".")):
        return "norms"
    if "*" in spec.name:
        return ""
    return "head" if spec.pipeline_stage == "last" else "embedding"


WRAPPER = Lora()

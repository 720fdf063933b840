"""The blueprint: one table per model family that describes the layout of every parameter.

    name pattern | global shape | tensor-parallel dim | fused parts | pipeline stage | layers | init | FLOP tokens

Initialization, local shapes, optimizer groups, gradient sync, checkpoints, conversion and the memory plan read this
table and nothing else. In a name pattern `*` stands for the layer index. A row may be for some layers only; rows of
different layers may have the same name pattern.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

from trainyard.core.splits import FULL_MODEL, ModelShard, head_range, replication_factor
from trainyard.core.tensor_slice import TensorSlice

SCORE_HEAD = "score.weight"
StagePlacement = Literal["first", "block", "last", "both"]
FlopsTokens = Literal["tokens", "masked", "first", "nothing"]
TpGradient = Literal["by_tokens", "equal", "partial"]


@dataclass(frozen=True)
class FusedPart:
    """A range of a fused matrix along its first dim, split over tensor-parallel ranks independently of the others.

    Its name is the parameter's name without fusion. Initial weights are a function of that name, so that fusing does
    not change them.
    """

    name: str
    size: int
    units: int
    """Indivisible units (heads). If tp does not divide them, several ranks hold the same units."""


@dataclass(frozen=True)
class ParamSpec:
    """Shape, split, placement and initialization of one parameter (or of one per layer, if the name has a `*`)."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    """Dim that tensor-parallel ranks split; None if every rank has the full parameter."""
    fused_parts: tuple[FusedPart, ...] = ()
    """The parts of a fused matrix; empty for any other parameter."""
    pipeline_stage: StagePlacement = "block"
    """Stage that holds the parameter: the first, the last, both of them (tied embedding), or that of its block."""
    init_std: float | None = None
    """Standard deviation of normal initial values; None fills the parameter with `init_value`."""
    init_value: float = 0.0
    init_log_range: tuple[float, float] | None = None
    """Initial values are logarithms of numbers that are uniform between these two, as for rates of decay."""
    flops_tokens: FlopsTokens = "nothing"
    """Tokens that this matrix multiplies (for FLOP counts); `nothing` for a lookup table or a vector."""
    padded: bool = False
    """Zero rows at the end make the shards of all tensor-parallel ranks equal (vocabularies)."""
    experts: int = 0
    """Number of experts whose matrices or biases are the fused parts, in the order of experts, so that an
    expert-parallel rank holds a range of parts; 0: not of experts."""
    active_experts: int = 0
    """Number of experts that a token uses."""
    uses: int = 1
    """Times that the matrix multiplies each of these tokens."""
    tp_gradient: TpGradient = "by_tokens"
    """Gradient of an unsplit parameter on tensor-parallel ranks. by_tokens: of the tokens that a rank holds, which are
    all of them without sequence parallelism; equal: of all tokens on every rank; partial: of a rank's share of the
    work (its heads or experts), so that it is always summed."""
    load_step: float = 0.0
    """Above 0 for a router's bias that balances the load of experts: its gradient is the load, each element moves by
    this much against its sign, and neither the gradient norm nor the update rule sees it."""
    layers: frozenset[int] | None = None
    """The layers whose blocks have it; None: all. `parse_layers` reads them from text."""
    trained: bool = True
    """False: the parameter keeps its values, and has no gradient, optimizer state or fp32 master weight."""
    storage: Literal["", "nf4", "fp8"] = ""
    """How a run keeps the weight of a linear layer that is not trained; empty: in the compute dtype."""
    lr_scale: float = 1.0
    """Its learning rate as a multiple of the run's."""
    norms_of: str = ""
    """The weight whose row norms are the initial values of this vector; empty: `init_std` and `init_value` are used."""

    def holds_for(self, layer: int | None) -> bool:
        """True if the block of this layer has the parameter."""
        return self.layers is None or layer in self.layers

    def sums_tp_gradient(self, sequence_parallel: bool) -> bool:
        """True if the gradient of this unsplit parameter is a sum over tensor-parallel ranks."""
        return self.tp_gradient == "partial" or (self.tp_gradient == "by_tokens" and sequence_parallel)

    def local_parts(self, shard: ModelShard) -> tuple[FusedPart, ...]:
        """The fused parts that a rank holds, each of them split over tensor-parallel ranks."""
        if not self.experts:
            return self.fused_parts
        count = len(self.fused_parts) // shard.ep
        return self.fused_parts[shard.ep_rank * count : (shard.ep_rank + 1) * count]

    @property
    def is_linear(self) -> bool:
        """True for the weight of a linear layer of a block, which a wrapper may surround."""
        is_of_block = "*" in self.name and self.name.endswith(".weight")
        return is_of_block and self.tp_dim is not None and self.flops_tokens == "tokens" and not self.experts

    @property
    def flops_share(self) -> float:
        """Share of the matrix that a token multiplies, times how often."""
        return self.uses * (self.active_experts / self.experts if self.experts else 1.0)

    @property
    def matmul_passes(self) -> int:
        """Multiplications of a training step with each element of the matrix: forward, and backward for the gradients
        of its input and, if it is trained, of itself."""
        return 3 if self.trained else 2

    @property
    def weight_decay(self) -> bool:
        """True for matrices and embeddings, which are the parameters with random initial values."""
        return self.init_std is not None


@dataclass(frozen=True)
class Blueprint:
    """The parameter table of one model."""

    specs: tuple[ParamSpec, ...]
    layers: int
    tied_head: tuple[int, int, FlopsTokens] | None = None
    """(vocab, hidden, FLOP tokens) of an output projection that shares the embedding's matrix."""

    @cached_property
    def _by_pattern(self) -> dict[str, list[ParamSpec]]:
        """The rows of each name pattern, each for other layers."""
        rows: dict[str, list[ParamSpec]] = {}
        for spec in self.specs:
            rows.setdefault(spec.name, []).append(spec)
        return rows

    def parameter_names(self) -> Iterator[str]:
        """Every parameter of the full model."""
        for spec in self.specs:
            if "*" in spec.name:
                yield from (spec.name.replace("*", str(layer)) for layer in self.layers_of(spec))
            else:
                yield spec.name

    def layers_of(self, spec: ParamSpec) -> Iterable[int]:
        """The layers that have this parameter of a block, in order."""
        return range(self.layers) if spec.layers is None else sorted(spec.layers)

    def copies(self, spec: ParamSpec) -> int:
        """Number of parameters that this row describes: one outside the blocks, else one for each of its layers."""
        return 1 if "*" not in spec.name else self.layers if spec.layers is None else len(spec.layers)

    def block_specs(self, layer: int) -> tuple[ParamSpec, ...]:
        """The parameters of a layer."""
        return tuple(spec for spec in self.specs if "*" in spec.name and spec.holds_for(layer))

    def spec(self, name: str) -> ParamSpec:
        layer = layer_index(name)
        for spec in self._by_pattern[name_pattern(name)]:
            if spec.holds_for(layer):
                return spec
        raise KeyError(name)

    def __contains__(self, name: str) -> bool:
        layer = layer_index(name)
        return any(spec.holds_for(layer) for spec in self._by_pattern.get(name_pattern(name), ()))

    def local_slices(self, name: str, shard: ModelShard = FULL_MODEL) -> list[TensorSlice]:
        """The slices of `name` that a rank holds: one per fused part, in order."""
        spec, layer = self.spec(name), layer_index(name)
        tp, rank = shard.tp, shard.tp_rank
        dim = spec.tp_dim or 0
        slices = []
        for part in spec.local_parts(shard) or (FusedPart(spec.name, spec.shape[0], spec.shape[0]),):
            size, units = (part.size, part.units) if dim == 0 else (spec.shape[dim], spec.shape[dim])
            start, stop = 0, size
            if spec.padded:
                rows = -(-size // tp)
                start, stop = (min(end * rows, size) for end in (rank, rank + 1))
            elif spec.tp_dim is not None:
                start, stop = (end * (size // units) for end in head_range(units, tp, rank))
            part_name = part.name.replace("*", "" if layer is None else str(layer))
            slices.append(TensorSlice.full(part_name, (part.size, *spec.shape[1:])).narrow(dim, start, stop))
        return slices

    def replication(self, name: str, shard: ModelShard) -> list[int]:
        """Number of tensor-parallel ranks that hold the same values, for each slice of `name` on a rank."""
        spec, tp = self.spec(name), shard.tp
        parts = spec.local_parts(shard)
        if spec.tp_dim is None:
            return [tp] * max(len(parts), 1)
        if spec.tp_dim > 0:
            return [replication_factor(spec.shape[spec.tp_dim], tp)] * max(len(parts), 1)
        return [replication_factor(part.units, tp) for part in parts] or [1]

    def local_shape(self, name: str, shard: ModelShard = FULL_MODEL) -> tuple[int, ...]:
        """The shape that a rank holds, padding included."""
        spec = self.spec(name)
        if spec.padded:
            return (-(-spec.shape[0] // shard.tp), *spec.shape[1:])
        slices = self.local_slices(name, shard)
        return (sum(piece.sizes[0] for piece in slices), *slices[0].sizes[1:])

    def trained_names(self) -> list[str]:
        """Every parameter of the full model that is trained."""
        return [*filter(self.is_trained, self.parameter_names())]

    def is_trained(self, name: str) -> bool:
        return self.spec(name).trained

    @property
    def tied_head_passes(self) -> int:
        """`ParamSpec.matmul_passes` of the output projection that shares the embedding's matrix."""
        return next(spec.matmul_passes for spec in self.specs if spec.pipeline_stage == "both")

    @property
    def trains_embedding(self) -> bool:
        """True if the input of the first layer has a gradient."""
        return any(spec.trained for spec in self.specs if spec.pipeline_stage in ("first", "both"))

    @property
    def trained_count(self) -> int:
        """Number of weights in the full model that are trained."""
        return self.parameter_count(lambda spec: spec.trained)

    def parameter_count(self, included: Callable[[ParamSpec], bool] = lambda spec: True) -> int:
        """Number of weights in the full model, or in those of its parameters that are `included`."""
        return sum(prod(spec.shape) * self.copies(spec) for spec in self.specs if included(spec))


def with_score_head(blueprint: Blueprint, hidden: int, init_std: float) -> Blueprint:
    """The blueprint of a reward model, whose head has a row instead of a vocabulary. All tensor-parallel ranks have
    it: split, one row would need more messages than it saves."""
    head = ParamSpec(SCORE_HEAD, (1, hidden), None, (), "last", init_std, flops_tokens="tokens", tp_gradient="equal")
    others = (spec for spec in blueprint.specs if not (spec.padded and spec.pipeline_stage == "last"))
    untied = (replace(spec, pipeline_stage="first") if spec.pipeline_stage == "both" else spec for spec in others)
    return Blueprint((*untied, head), blueprint.layers)


def column_parallel_specs(
    name: str, parts: tuple[FusedPart, ...], columns: tuple[int, ...], fused: bool, init_std: float | None = None
) -> list[ParamSpec]:
    """The parameters of column-parallel parts: one fused parameter called `name`, or one per part."""
    groups = [(name, parts)] if fused else [(part.name, (part,)) for part in parts]
    tokens: FlopsTokens = "nothing" if init_std is None else "tokens"
    return [
        ParamSpec(own, (sum(part.size for part in group), *columns), 0, group, init_std=init_std, flops_tokens=tokens)
        for own, group in groups
    ]


def for_layers(layers: Iterable[int], specs: Iterable[ParamSpec]) -> list[ParamSpec]:
    """The same rows for some layers only; none if there are no such layers."""
    members = frozenset(layers)
    return [replace(spec, layers=members) for spec in specs] if members else []


def parse_layers(text: str, layers: int) -> frozenset[int]:
    """The layers that a text such as `0-2`, `3-` (to the last one), `even`, `odd` or `0,5-7` names among `layers`
    layers."""
    named: set[int] = set()
    for item in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(?P<parity>even|odd)|(?P<first>\d+)(?P<dash>-(?P<last>\d*))?", item)
        if not match:
            raise ValueError(f"{text!r}: not a set of layers; write for example 0-2, 3-, even, odd or 0,5-7")
        if match["parity"]:
            named |= set(range(match["parity"] == "odd", layers, 2))
            continue
        first = int(match["first"])
        last = first if not match["dash"] else int(match["last"] or layers - 1)
        if not first <= last < layers:
            raise ValueError(f"{text!r}: the model's {layers} layers are 0 to {layers - 1}")
        named |= set(range(first, last + 1))
    return frozenset(named)


def layers_text(layers: Iterable[int]) -> str | None:
    """What `parse_layers` reads as these layers; None if there are none."""
    ranges: list[list[int]] = []
    for layer in sorted(layers):
        if ranges and ranges[-1][-1] == layer - 1:
            ranges[-1][1:] = [layer]
        else:
            ranges.append([layer])
    return ",".join("-".join(map(str, ends)) for ends in ranges) or None


def name_pattern(name: str) -> str:
    """`layers.3.mlp.up.weight` -> `layers.*.mlp.up.weight`."""
    return re.sub(r"\.\d+\.", ".*.", name)


def layer_index(name: str) -> int | None:
    """3 for `layers.3.mlp.up.weight`; None outside the blocks."""
    match = re.search(r"\.(\d+)\.", name)
    return int(match.group(1)) if match else None

"""ModuleFactory: builds layers whose parameters have the local shapes of the blueprint and no memory yet."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from trainyard.core.errors import UserError
from trainyard.core.section import Section
from trainyard.core.user_code import load_object
from trainyard.families.blueprint import SCORE_HEAD, Blueprint, layer_index
from trainyard.families.decoder import DecoderConfig
from trainyard.families.linear_wrapper import LinearWrapper
from trainyard.kernels.fp8_linear import Fp8Options
from trainyard.kernels.reference import Kernels
from trainyard.models.layers import (
    CoreAttention,
    Dropout,
    Embedding,
    LatentAttention,
    LayerNorm,
    Linear,
    OutputProjection,
    RMSNorm,
    RMSNormOfAllHeads,
    VocabEmbedding,
)
from trainyard.parallel.axes import Axes


def import_module_class(module: str | Callable[..., Any]) -> Callable[..., Any]:
    """What builds a module: a class, or the name of one."""
    return load_object(module, "a class") if isinstance(module, str) else module


class Fp8Layers(NamedTuple):
    """The layers that multiply in fp8, and the options for it."""

    recipe: Fp8Options
    layers: range

    def for_parameter(self, name: str) -> Fp8Options | None:
        return self.recipe if layer_index(name) in self.layers else None


class LayerState(Protocol):
    """What a layer keeps of sequences while it generates: fp32 tensors of the shapes that it asked for, one of each for
    every sequence."""

    def read(self, rows: int) -> tuple[Tensor, list[Tensor]]:
        """For the `rows` sequences of a forward pass: how many of its tokens count, [rows], and the states before
        the first of them, [rows, *shape]: zeros where a sequence begins. Tokens that do not count are at the end, and
        must not change the state."""

    def write(self, *states: Tensor) -> None:
        """The states behind the last token that counts."""


class ModuleFactory:
    """Builds the layers of one rank by parameter name."""

    def __init__(self, blueprint: Blueprint, axes: Axes, kernels: Kernels, fp8: Fp8Layers | None = None) -> None:
        self.blueprint, self.kernels, self.fp8 = blueprint, kernels, fp8
        self.tp, self.cp, self.ep = axes.tp, axes.cp, axes.ep
        self.shard = axes.model_shard
        self.layers: Sequence[int] = range(blueprint.layers)
        """The layers to build: those of the rank's pipeline stage."""
        self.linear_wrappers: Sequence[tuple[LinearWrapper, Section]] = ()
        """What goes around linear layers, each with its options, from the innermost on."""

    def blocks(self, build: Callable[[str], nn.Module]) -> nn.ModuleDict:
        """The blocks of this stage by layer index. `build` makes one from the name of its parameters (`layers.3`)."""
        return nn.ModuleDict({str(layer): build(f"layers.{layer}") for layer in self.layers})

    def parameter(self, name: str) -> nn.Parameter:
        if name not in self.blueprint:
            raise UserError(f"its module has {name}, which its blueprint has not")
        shape = self.blueprint.local_shape(name, self.shard)
        return nn.Parameter(torch.empty(shape, device="meta"))

    def optional_parameter(self, name: str) -> nn.Parameter | None:
        """The parameter, if the blueprint has it."""
        return self.parameter(name) if name in self.blueprint else None

    def parameters(self, name: str, parts: Sequence[str]) -> nn.ParameterDict:
        """The parameters `name.part` by part, such as the matrices of experts."""
        return nn.ParameterDict({part: self.parameter(f"{name}.{part}") for part in parts})

    def linear(self, name: str) -> Linear:
        bias = self.optional_parameter(f"{name}.bias")
        fp8 = self.fp8.for_parameter(name) if self.fp8 else None
        linear = Linear(self.parameter(f"{name}.weight"), bias, self.kernels, fp8)
        spec = self.blueprint.spec(f"{name}.weight")
        for wrapper, options in self.linear_wrappers:
            if spec.is_linear and wrapper.specs(options, spec):
                linear = import_module_class(wrapper.module)(linear, self, name, options)
        return linear

    def linears(self, module: nn.Module, name: str, parts: Sequence[str]) -> list[Linear]:
        """The linear layers `name.part`, as children of `module` with the names of the parts."""
        linears = [self.linear(f"{name}.{part}") for part in parts]
        for part, linear in zip(parts, linears, strict=True):
            module.add_module(part, linear)
        return linears

    def embedding(self, name: str) -> Embedding:
        return Embedding(self.parameter(f"{name}.weight"))

    def vocab_embedding(self, name: str) -> VocabEmbedding:
        return VocabEmbedding(self.parameter(f"{name}.weight"), self.tp, self.kernels)

    def output_projection(self, name: str) -> OutputProjection:
        bias = self.optional_parameter(f"{name}.bias")
        return OutputProjection(self.parameter(f"{name}.weight"), self.tp, bias)

    def head(self, model: nn.Module, tied: bool) -> OutputProjection:
        """The matrix of the head of a decoder: of its scores, that of its embedding, or its own."""
        if SCORE_HEAD in self.blueprint:
            # Registered first under this name, by which torch then names the parameter.
            model.score = self.output_projection("score")
            return model.score
        return model.embedding if tied else self.output_projection("output")  # type: ignore[return-value]

    def rms_norm(self, name: str, eps: float, plus_one: bool = False) -> RMSNorm:
        return RMSNorm(self.parameter(f"{name}.weight"), eps, self.kernels, plus_one)

    def decoder_norm(self, name: str, c: DecoderConfig) -> RMSNorm | LayerNorm | None:
        """The norm of the family's kind, if the blueprint has it."""
        if f"{name}.weight" not in self.blueprint:
            return None
        if c.style.norm in ("rms", "rms_plus_one"):
            return self.rms_norm(name, c.norm_eps, c.style.norm == "rms_plus_one")
        return self.layer_norm(name, c.norm_eps)

    def norm_of_all_heads(self, name: str, eps: float) -> RMSNormOfAllHeads:
        """An RMSNorm over the heads of all tensor-parallel ranks."""
        name = f"{name}.weight"
        (width,), copies = self.blueprint.spec(name).shape, self.blueprint.replication(name, self.shard)[0]
        return RMSNormOfAllHeads(self.parameter(name), eps, self.tp, width, copies)

    def layer_norm(self, name: str, eps: float, post_norm: bool = False) -> LayerNorm:
        bias = self.parameter(f"{name}.bias") if f"{name}.bias" in self.blueprint else None
        return LayerNorm(self.parameter(f"{name}.weight"), bias, eps, self.kernels, post_norm)

    def layer_state(self, *shapes: tuple[int, ...]) -> LayerState | None:
        """What a layer that is not attention keeps of a sequence, on this rank. None where whole sequences are
        computed, as in training."""
        return None

    def dropout(self, p: float, site: str) -> Dropout:
        return Dropout(p, site, self.kernels)

    def core_attention(
        self, heads: int, kv_heads: int, causal: bool, dropout: float, site: str, window: int | None = None, *,
        scale: float | None = None, soft_cap: float | None = None, sinks: nn.Parameter | None = None,
    ) -> CoreAttention:  # fmt: skip
        """Attention over this rank's heads. `window` is the number of tokens, its own included, that a token sees at
        most; `scale` multiplies q k (none: 1 / sqrt of their width); a `soft_cap` c makes a score c tanh(score / c);
        `sinks` are a logit of each of this rank's heads that takes part in the softmax without a value. Assign sinks to
        an attribute first: it names them. Values may have another width than keys."""
        axes = self.tp, self.cp, self.kernels
        return self._attention(heads, kv_heads, causal, dropout, site, *axes, window, scale, soft_cap, sinks)

    def _attention(self, *arguments: Any) -> CoreAttention:
        """From the arguments of `CoreAttention`."""
        return CoreAttention(*arguments)

    def latent_attention(
        self, heads: int, latent_size: int, key_size: int, value_size: int, site: str, scale: float | None = None
    ) -> LatentAttention:
        """Attention of queries over latents, from which the module makes keys and values."""
        core = self.core_attention(heads, heads, True, 0.0, site, scale=scale)
        return LatentAttention(core, latent_size, key_size, value_size)

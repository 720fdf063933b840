"""Builds an engine: a model whose attention has a cache, with parameters from any source."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainyard.config.batch_invariance import model_conflict
from trainyard.core.constants import GIB
from trainyard.core.errors import UserError
from trainyard.devices import Device
from trainyard.families.blueprint import ParamSpec
from trainyard.inference.adapters import AdaptedLinear, AdapterStack
from trainyard.inference.cached_attention import CachedAttention, CacheSize, CacheState, cache_length
from trainyard.inference.cached_latent_attention import CachedLatentAttention
from trainyard.inference.engine import Engine
from trainyard.inference.layer_state import SlotStates
from trainyard.kernels.fp8_linear import Fp8Matrix
from trainyard.kernels.fp8_weight import Fp8Weight
from trainyard.kernels.nf4 import Nf4Matrix
from trainyard.models import ModelConfig, assign_parameters, blueprint_of, build_model, store_weights
from trainyard.models.layers import CoreAttention, LatentAttention
from trainyard.models.module_factory import ModuleFactory
from trainyard.parallel.axes import Axes
from trainyard.parallel.process_group import Group
from trainyard.parallel.tensor_parallel import Linear, TensorAxis


@dataclass(frozen=True)
class EngineShape:
    """Sizes and numbers of an engine."""

    slots: int
    """Maximum number of sequences per batch."""
    max_seq_len: int
    """Longest prompt plus new tokens."""
    dtype: torch.dtype
    fp8_weights: bool = False
    """Keep the matrices of linear layers in fp8; vocabularies and all computations stay in `dtype`."""


class InferenceFactory(ModuleFactory):
    """Builds models whose causal attention has a cache, whose other layers have the states that they ask for, and whose
    linear layers may have several adapters."""

    def __init__(self, size: CacheSize, state: CacheState, adapters: AdapterStack | None, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.size, self.state, self.adapters = size, state, adapters

    def linear(self, name: str) -> Linear:
        linear = super().linear(name)
        found = self.adapters.layer(name) if self.adapters else None
        return AdaptedLinear(linear, self.state, found) if found else linear

    def layer_state(self, *shapes: tuple[int, ...]) -> SlotStates:
        return SlotStates(self.size, self.state, shapes)

    def _attention(self, heads: int, kv_heads: int, causal: bool, *arguments: Any) -> CoreAttention:
        if not causal:
            return super()._attention(heads, kv_heads, causal, *arguments)
        return CachedAttention(self.size, self.state, heads, kv_heads, causal, *arguments)

    def latent_attention(
        self, heads: int, latent_size: int, key_size: int, value_size: int, site: str, scale: float | None = None
    ) -> LatentAttention:
        axes = self.tp, self.cp, self.kernels
        core = super()._attention(heads, heads, True, 0.0, site, *axes, None, scale)
        return CachedLatentAttention(self.size, self.state, core, latent_size, key_size, value_size)


def build_engine(
    config: ModelConfig,
    device: Device,
    tp: Group,
    shape: EngineShape,
    make_parameter: Callable[[str], Tensor],
    existing: dict[str, nn.Parameter] | None = None,
    stored: Mapping[str, Nf4Matrix | Fp8Matrix] | None = None,
    compiled: bool = False,
    fused_kernels: bool = True,
    adapters: AdapterStack | None = None,
    batch_invariant: bool = False,
) -> Engine:
    """The engine of one tensor-parallel rank. `existing` has parameters by name that another model shares with it, and
    `stored` those that it keeps in 4 or 8 bits; `make_parameter` makes the others. `adapters` are those that sequences
    may use. `batch_invariant` gives a sequence the same bits whatever else is in the batch."""
    config = config.without_mtp
    if batch_invariant:
        check_invariance(config, tp.size, compiled, shape.fp8_weights)
    check_memory(config, device, tp.size, shape, bool(existing), batch_invariant)
    handle = device.torch_device
    lengths, numbers, is_active = (torch.zeros(shape.slots, dtype=torch.int32, device=handle) for _ in range(3))
    state = CacheState(lengths, numbers, is_active)
    # The last position takes the token that is in flight when a sequence ends.
    options = not batch_invariant, config.head_size, config.value_size, shape.dtype, handle
    size = CacheSize(shape.slots, shape.max_seq_len + 1, *options)
    # Matrix multiplications that add the residual must not do so before ranks have summed their parts.
    make_kernels = device.decode_kernels if tp.size == 1 else device.kernels
    kernels = device.batch_invariant_kernels() if batch_invariant else make_kernels(fused_kernels)
    model = build_model(
        config,
        handle,
        Axes(TensorAxis(tp)),
        kernels=kernels,
        factory=partial(InferenceFactory, size, state, adapters),
    )
    blueprint = blueprint_of(config)

    def make_weight(name: str) -> Tensor:
        tensor, spec = make_parameter(name), blueprint.spec(name)
        if not shape.fp8_weights or not _is_linear_weight(spec):
            return tensor
        return Fp8Weight.quantize(tensor, tp.all_reduce_max if spec.tp_dim == 1 else lambda amax: amax)

    store_weights(model, stored or {})
    assign_parameters(model, make_weight, existing)
    return Engine(model.eval(), state, device, config.vocab, compiled)


def check_invariance(config: ModelConfig, tp: int, compiled: bool, fp8_weights: bool) -> None:
    """Raise UserError if no kernels are the same whatever else is in the batch."""
    options = {f"--tp {tp}": tp > 1, "--compile": compiled, "--fp8-weights": fp8_weights}
    conflicts = [f"not with {option}" for option, given in options.items() if given]
    if reason := next(iter(conflicts), model_conflict(config)):
        raise UserError(f"--batch-invariant: {reason}")


def _is_linear_weight(spec: ParamSpec) -> bool:
    is_matrix = len(spec.shape) == 2 and spec.flops_tokens != "nothing" and not spec.padded and not spec.experts
    return is_matrix and spec.name.endswith(".weight")  # not those of adapters, which are small


def cache_bytes(
    config: ModelConfig, tp: int, slots: int, max_seq_len: int, itemsize: int, batch_invariant: bool
) -> int:
    """Bytes of what an engine keeps of tokens on each rank: keys and values, latents, or states."""
    numbers = of_states = 0
    for layer in range(config.layers):
        length = cache_length(None if batch_invariant else config.attention_window(layer), max_seq_len + 1)
        copies = 1 if length > max_seq_len else 2  # a ring comes with a copy
        numbers += copies * length * config.cache_width(layer, tp)
        if recurrence := config.recurrence(layer):
            of_states += 2 * recurrence.state_size // tp * torch.float32.itemsize  # with a copy, too
    return slots * (numbers * itemsize + of_states)


def check_memory(
    config: ModelConfig, device: Device, tp: int, shape: EngineShape, shares_parameters: bool, batch_invariant: bool
) -> None:
    """Raise UserError if weights and cache cannot fit."""
    available, sizes = device.memory_per_rank(tp), (shape.slots, shape.max_seq_len, shape.dtype.itemsize)
    cache, weights = cache_bytes(config, tp, *sizes, batch_invariant), 0
    if not shares_parameters:
        blueprint = blueprint_of(config)
        weights = blueprint.parameter_count() * shape.dtype.itemsize // tp
        if shape.fp8_weights:
            matrices = blueprint.parameter_count(_is_linear_weight)
            weights -= matrices * (shape.dtype.itemsize - 1) // tp
    if available and cache + weights > available:
        raise UserError(
            f"the weights need {weights / GIB:.1f} GiB and a cache of {shape.slots} x {shape.max_seq_len} tokens "
            f"{cache / GIB:.1f} GiB, but there are {available / GIB:.1f} GiB; lower --max-seq-len or --max-batch"
        )

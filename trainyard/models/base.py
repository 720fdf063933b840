"""TransformerStage: embedding, blocks and head of any family, for the full model or for one pipeline stage of it."""

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainyard.core.batch import Batch
from trainyard.core.counter_rng import RowSeeds
from trainyard.families.blueprint import Blueprint
from trainyard.models.layers import (
    OutputProjection,
    VocabEmbedding,
    add_uniform_noise,
    dropout_site,
    token_seeds,
)
from trainyard.models.module_factory import ModuleFactory
from trainyard.models.output import ModelOutput
from trainyard.parallel.layout import StageSpec


@runtime_checkable
class RoutesTokens(Protocol):
    """A mixture of experts. It adds terms of its own to the loss, as means over the samples of a step."""

    samples_per_step: int
    has_grouped_gemm: bool


@runtime_checkable
class DropsInput(Protocol):
    """A linear layer that drops elements of its input with probability `p`, by the seeds of the input's tokens."""

    p: float
    row_seeds: RowSeeds | None


@functools.cache
def _seeded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a block with a forward that takes row seeds and gives them to its linear layers. A recompute of the
    block runs it again, with the seeds of the same micro batch."""

    def forward(self: nn.Module, *args: Any, row_seeds: RowSeeds | None = None, **kwargs: Any) -> Any:
        linears: Any = self.seeded_linears
        for linear in linears:
            linear.row_seeds = row_seeds
        return super(seeded, self).forward(*args, **kwargs)  # type: ignore[arg-type]

    seeded = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    return seeded


class TransformerStage(nn.Module):
    """The layers of one pipeline stage (all of them without pipeline parallelism).

    A family defines `layers` and implements `block_inputs`, `embed` and `head`.
    """

    layers: nn.ModuleDict
    """Blocks by layer index. Keys stay global when a pipeline stage deletes the layers of other stages."""
    embedding: VocabEmbedding
    """Of tokens; deleted by pipeline stages that do not need it."""
    noise_site: Tensor
    tp_rank: Tensor
    """The tensor-parallel and context-parallel ranks are buffers, so that all ranks share one compiled graph."""
    cp_rank: Tensor
    static_length: int | None = None
    """Longer sequences rotate their positions by their length, and the keys of a token depend on it; None: in none."""

    def __init__(self, make: ModuleFactory, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.tp, self.cp, self.kernels = vocab_size, make.tp, make.cp, make.kernels
        self.is_first = self.is_last = True
        self.max_seq_len = 0
        """Longest sequence of a packed batch; whoever packs batches sets it before the first one."""
        self.seeds_linears = False
        """True if linear layers drop elements of their input (`seed_linears`)."""
        self.noise_bound = 0.0
        """Largest absolute value of the noise that training adds to the embedded tokens."""
        self.pre_layer_hook: Callable[[str], None] = lambda layer: None
        """Called with "first" before the embedding, with the layer index before each block and with "last" before the
        head. ZeRO-1 sets it to wait for weights that are still being gathered."""
        self.register_buffer("noise_site", dropout_site("embedding.noise"), persistent=False)
        self.register_buffer("tp_rank", torch.tensor(self.tp.rank, dtype=torch.int32), persistent=False)
        self.register_buffer("cp_rank", torch.tensor(self.cp.rank, dtype=torch.int32), persistent=False)

    @property
    def blocks(self) -> list[nn.Module]:
        """What is recomputed, compiled and sharded as a unit: the layers, and other blocks that a family has."""
        return list(self.layers.children())

    def block_inputs(self, batch: Batch) -> tuple[Any, ...]:
        """The arguments that every block takes besides the activations."""
        raise NotImplementedError

    def embed(self, batch: Batch, *block_inputs: Any) -> Tensor:
        """Activations [B, T, D] of the first block."""
        raise NotImplementedError

    def embed_tokens(self, batch: Batch) -> Tensor:
        """The embedded tokens of this rank, in training with noise (NEFTune); `embed` begins with them."""
        x_BTD = self.embedding(batch["tokens"])
        if not (self.training and self.noise_bound):
            return x_BTD
        return add_uniform_noise(x_BTD, self.noise_bound, self.dropout_seeds(batch)[1], self.noise_site)

    def pack_input(self, x_BTD: Tensor) -> Any:
        """The input of a stage's first block: stages exchange one tensor, blocks may exchange several."""
        return x_BTD

    def unpack_output(self, x: Any) -> Tensor:
        """The tensor to send to the next stage, from the output of a stage's last block."""
        out: Tensor = x
        return out

    def head(self, x_BTD: Tensor, batch: Batch) -> ModelOutput:
        """The output of the last stage."""
        raise NotImplementedError

    def forward(self, batch: Batch, x_BTD: Tensor | None = None) -> ModelOutput | Tensor:
        """Run this stage: `x_BTD` comes from the previous stage, and all but the last stage return a tensor."""
        x_BTD = self.run_blocks(batch, x_BTD)
        if not self.is_last:
            return x_BTD
        self.pre_layer_hook("last")
        return self.head(x_BTD, batch)

    def run_blocks(self, batch: Batch, x_BTD: Tensor | None = None) -> Tensor:
        """The output of this stage's last block."""
        block_inputs = self.block_inputs(batch)
        seeds = {"row_seeds": self.dropout_seeds(batch)[0]} if self.seeds_linears and self.training else {}
        if self.is_first:
            self.pre_layer_hook("first")
            x_BTD = self.embed(batch, *block_inputs)
        assert x_BTD is not None
        x = self.pack_input(x_BTD)
        del x_BTD  # blocks decide whether the input of the first one is kept
        for index, block in self.layers.items():
            self.pre_layer_hook(index)
            x = block(x, *block_inputs, **seeds)
        return self.unpack_output(x)

    def make_output(
        self,
        hidden: Tensor,
        projection: OutputProjection,
        bias: Tensor | None = None,
        next_sentence: Tensor | None = None,
        tokens_sharded: bool = False,
        soft_cap: float | None = None,
    ) -> ModelOutput:
        """A ModelOutput for this rank's rows of the vocabulary."""
        ranks = (self.tp, self.tp_rank, projection.vocab_start, self.vocab_size)
        return ModelOutput(hidden, projection.weight, bias, next_sentence, *ranks, tokens_sharded, self.cp, soft_cap)

    def token_positions(self, batch: Batch) -> Tensor:
        """Global positions of this rank's tokens in their sequence: [T], or [1, N] for a packed batch."""
        if "cu_seqlens" in batch:
            return batch["position_ids"]
        return self.cp.token_positions(batch["tokens"].shape[1], self.cp_rank)

    def dropout_seeds(self, batch: Batch) -> tuple[RowSeeds, RowSeeds]:
        """Row seeds of all tokens, and of the tokens this rank holds between attention and MLP."""
        seeds = token_seeds(batch, self.token_positions(batch))
        return seeds, RowSeeds(*(self.tp.local_tokens(seed, self.tp_rank) for seed in seeds))

    def configure_experts(self, samples_per_step: int, has_grouped_gemm: bool) -> None:
        """Tell mixtures of experts of how many samples the loss is a mean, and what the device can multiply."""
        for module in self.modules():
            if isinstance(module, RoutesTokens):
                module.samples_per_step, module.has_grouped_gemm = samples_per_step, has_grouped_gemm

    def seed_linears(self) -> None:
        """Let blocks give the row seeds of their tokens to linear layers with dropout. Such layers come from wrappers,
        of which the module of a family knows nothing."""
        for block in self.layers.children():
            linears = tuple(module for module in block.modules() if isinstance(module, DropsInput) and module.p)
            if linears:
                self.seeds_linears = True
                vars(block)["seeded_linears"] = linears  # not children of the block
                block.__class__ = _seeded_class(type(block))  # type: ignore[arg-type]

    def prune_to_stage(self, stage: StageSpec, blueprint: Blueprint) -> None:
        """Delete the modules of all other stages. Parameter names stay global."""
        self.is_first, self.is_last = stage.is_first, stage.is_last
        for index in [index for index in self.layers if int(index) not in stage.layers]:
            del self.layers[index]
        names = {parameter: name for name, parameter in self.named_parameters()}
        children = [(key, child) for key, child in self.named_modules(remove_duplicate=False) if key and "." not in key]
        for key, child in children:
            placements = {blueprint.spec(names[parameter]).pipeline_stage for parameter in child.parameters()}
            on_first, on_last = placements & {"first", "both"}, placements & {"last", "both"}
            needed = (stage.is_first and on_first) or (stage.is_last and on_last)
            if key != "layers" and placements and not needed:
                delattr(self, key)

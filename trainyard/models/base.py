"""Embedding, blocks, head: what all families share, and how a pipeline stage is a part of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainyard.models.blueprint import Blueprint
from trainyard.models.layers import Batch, Draw, OutputProjection, make_draw
from trainyard.models.output import ModelOutput
from trainyard.parallel.layout import StageSpec
from trainyard.parallel.tensor_parallel import Axes


class TransformerStage(nn.Module):
    """A family says what its ends do: `shared`, `embed` and `head`."""

    layers: nn.ModuleDict
    tp_rank: Tensor
    cp_rank: Tensor

    def __init__(self, axes: Axes, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.tp, self.cp = axes.tp, axes.cp
        self.is_first = self.is_last = True
        self.max_seq_len = 0
        """Longest sequence of a packed batch; whoever packs says it."""
        self.pre_layer_hook: Callable[[str], None] | None = None
        """Called before each part runs (its weights may still be on their way): "first", a block's number, "last"."""
        self.register_buffer("tp_rank", torch.tensor(axes.tp.rank, dtype=torch.int32), persistent=False)
        self.register_buffer("cp_rank", torch.tensor(axes.cp.rank, dtype=torch.int32), persistent=False)

    def block_inputs(self, batch: Batch) -> tuple[Any, ...]:
        """What every block is given besides the activations."""
        raise NotImplementedError

    def embed(self, batch: Batch, *shared: Any) -> Tensor:
        raise NotImplementedError

    def pack_input(self, x_BTD: Tensor) -> Any:
        """What the first block takes: blocks may hand each other more than one tensor, stages hand on one."""
        return x_BTD

    def unpack_output(self, x: Any) -> Tensor:
        """From what the last block gives."""
        out: Tensor = x
        return out

    def head(self, x_BTD: Tensor, batch: Batch) -> ModelOutput:
        raise NotImplementedError

    def forward(self, batch: Batch, x_BTD: Tensor | None = None) -> ModelOutput | Tensor:
        """The whole model, or a stage of it: `x_BTD` comes from the stage before, a tensor goes to the next."""
        shared = self.block_inputs(batch)
        x = x_BTD
        if self.is_first:
            self._before("first")
            x = self.embed(batch, *shared)
        assert x is not None
        inside = self.pack_input(x)
        for number, block in self.layers.items():
            self._before(number)
            inside = block(inside, *shared)
        x = self.unpack_output(inside)
        if not self.is_last:
            return x
        self._before("last")
        return self.head(x, batch)

    def _before(self, part: str) -> None:
        if self.pre_layer_hook:
            self.pre_layer_hook(part)

    def make_output(
        self,
        hidden: Tensor,
        projection: OutputProjection,
        bias: Tensor | None = None,
        next_sentence: Tensor | None = None,
        tokens_sharded: bool = False,
    ) -> ModelOutput:
        return ModelOutput(
            hidden, projection.weight, bias, next_sentence, self.tp, projection.first, self.vocab_size, tokens_sharded
        )

    def token_positions(self, batch: Batch) -> Tensor:
        """Global places of this rank's tokens in their sequence, [T]; of a packed batch [1, N]."""
        if "cu_seqlens" in batch:
            return batch["position_ids"]
        return self.cp.token_positions(batch["tokens"].shape[1], self.cp_rank)

    def draws(self, batch: Batch) -> tuple[Draw, Draw]:
        """What dropout draws by: for all tokens, and for those that this rank holds between the parts of a block."""
        draw = make_draw(batch, self.token_positions(batch))
        return draw, Draw(*(self.tp.local_tokens(words, self.tp_rank) for words in draw))

    def prune_to_stage(self, stage: StageSpec, blueprint: Blueprint) -> None:
        """Delete what another stage runs. Names stay global."""
        self.is_first, self.is_last = stage.is_first, stage.is_last
        for number in [number for number in self.layers if int(number) not in stage.layers]:
            del self.layers[number]
        names = {parameter: name for name, parameter in self.named_parameters()}
        ends = [(key, child) for key, child in self.named_modules(remove_duplicate=False) if key and "." not in key]
        for key, child in ends:
            places = {blueprint.spec(names[parameter]).pipeline_stage for parameter in child.parameters()}
            wanted = (stage.is_first and places & {"first", "both"}) or (stage.is_last and places & {"last", "both"})
            if key != "layers" and places and not wanted:
                delattr(self, key)

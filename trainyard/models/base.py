"""Embedding, blocks, head: what all families share, and how a pipeline stage is a part of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainyard.models.blueprint import Blueprint
from trainyard.models.layers import Batch, Draw, Head, make_draw
from trainyard.models.output import Output
from trainyard.parallel.layout import Stage
from trainyard.parallel.tensor_parallel import Axes


class Stack(nn.Module):
    """A family says what its ends do: `shared`, `embed` and `head`."""

    layers: nn.ModuleDict
    tp_rank: Tensor
    cp_rank: Tensor

    def __init__(self, axes: Axes, vocab: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.tp, self.cp = axes.tp, axes.cp
        self.first = self.last = True
        self.longest = 0
        """Longest sequence of a packed batch; whoever packs says it."""
        self.before: Callable[[str], None] | None = None
        """Called before each part runs (its weights may still be on their way): "first", a block's number, "last"."""
        self.register_buffer("tp_rank", torch.tensor(axes.tp.rank, dtype=torch.int32), persistent=False)
        self.register_buffer("cp_rank", torch.tensor(axes.cp.rank, dtype=torch.int32), persistent=False)

    def shared(self, batch: Batch) -> tuple[Any, ...]:
        """What every block is given besides the activations."""
        raise NotImplementedError

    def embed(self, batch: Batch, *shared: Any) -> Tensor:
        raise NotImplementedError

    def enter(self, x_BTD: Tensor) -> Any:
        """What the first block takes: blocks may hand each other more than one tensor, stages hand on one."""
        return x_BTD

    def leave(self, x: Any) -> Tensor:
        """From what the last block gives."""
        out: Tensor = x
        return out

    def head(self, x_BTD: Tensor, batch: Batch) -> Output:
        raise NotImplementedError

    def forward(self, batch: Batch, x_BTD: Tensor | None = None) -> Output | Tensor:
        """The whole model, or a stage of it: `x_BTD` comes from the stage before, a tensor goes to the next."""
        shared = self.shared(batch)
        x = x_BTD
        if self.first:
            self._before("first")
            x = self.embed(batch, *shared)
        assert x is not None
        inside = self.enter(x)
        for number, block in self.layers.items():
            self._before(number)
            inside = block(inside, *shared)
        x = self.leave(inside)
        if not self.last:
            return x
        self._before("last")
        return self.head(x, batch)

    def _before(self, part: str) -> None:
        if self.before:
            self.before(part)

    def result(
        self,
        states: Tensor,
        words: Head,
        bias: Tensor | None = None,
        next_sentence: Tensor | None = None,
        split: bool = False,
    ) -> Output:
        return Output(states, words.weight, bias, next_sentence, self.tp, words.first, self.vocab, split)

    def places(self, batch: Batch) -> Tensor:
        """Global places of this rank's tokens in their sequence, [T]; of a packed batch [1, N]."""
        if "starts" in batch:
            return batch["positions"]
        return self.cp.places(batch["tokens"].shape[1], self.cp_rank)

    def draws(self, batch: Batch) -> tuple[Draw, Draw]:
        """What dropout draws by: for all tokens, and for those that this rank holds between the parts of a block."""
        draw = make_draw(batch, self.places(batch))
        return draw, Draw(*(self.tp.part(words, self.tp_rank) for words in draw))

    def keep(self, stage: Stage, blueprint: Blueprint) -> None:
        """Delete what another stage runs. Names stay global."""
        self.first, self.last = stage.first, stage.last
        for number in [number for number in self.layers if int(number) not in stage.layers]:
            del self.layers[number]
        names = {parameter: name for name, parameter in self.named_parameters()}
        ends = [(key, child) for key, child in self.named_modules(remove_duplicate=False) if key and "." not in key]
        for key, child in ends:
            places = {blueprint.row(names[parameter]).place for parameter in child.parameters()}
            wanted = (stage.first and places & {"first", "both"}) or (stage.last and places & {"last", "both"})
            if key != "layers" and places and not wanted:
                delattr(self, key)

"""The arithmetic of ranks: how many of each kind, how many micro batches, and whether a configuration divides.

Ranks are arranged [pp][dp][cp][tp], tp fastest. Everything is checked here, before a process group exists.
"""

from dataclasses import dataclass
from typing import Self

from trainyard.config.base import nearest_divisor, nearest_multiples
from trainyard.config.schema import Config
from trainyard.errors import UserError


@dataclass(frozen=True)
class Layout:
    tp: int
    pp: int
    cp: int
    dp: int
    micro_batches: int
    """Micro batches per rank and optimizer step."""

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @classmethod
    def of(cls, config: Config, world: int) -> Self:
        """The layout of `config` on `world` ranks, or one line that says why there is none."""
        layout, train, model = config.layout, config.train, config.model
        shards = layout.tp * layout.pp * layout.cp
        ranks = f"layout tp={layout.tp} x pp={layout.pp} x cp={layout.cp}"
        if model.heads % layout.tp:
            near = nearest_divisor(layout.tp, model.heads)
            raise UserError(f"layout.tp={layout.tp}: does not divide model.heads={model.heads}; nearest: {near}")
        if layout.pp * layout.vpp > model.layers:
            raise UserError(
                f"layout.pp={layout.pp}: pp x vpp = {layout.pp * layout.vpp} stages for {model.layers} layers; "
                f"nearest: {max(model.layers // layout.vpp, 1)}"
            )
        if world % shards:
            raise UserError(
                f"{ranks}: needs a multiple of {shards} ranks, this run has {world}; "
                f"nearest: {nearest_multiples(world, shards)} ranks, or --smoke for a small trial here"
            )
        dp = world // shards
        if train.global_batch % (train.micro_batch * dp):
            near_batch = nearest_multiples(train.global_batch, train.micro_batch * dp)
            raise UserError(
                f"train.global_batch={train.global_batch}: not a multiple of micro_batch x data parallel = "
                f"{train.micro_batch} x {dp}; nearest: {near_batch}"
            )
        return cls(layout.tp, layout.pp, layout.cp, dp, train.global_batch // (train.micro_batch * dp))

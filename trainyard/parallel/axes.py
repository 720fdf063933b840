"""Where data crosses ranks. A model is handed axes and never imports torch.distributed.

`tp.gather(x)` before and `tp.scatter(x)` after attention and MLP are the only crossings of tensor parallelism in a
block. On one rank every crossing is the identity, so the same model code runs on a laptop and on a cluster.
"""

from dataclasses import dataclass, field

from torch import Tensor


class Axis:
    """One direction in which ranks are arranged. This one has a single rank."""

    size = 1
    rank = 0

    def gather(self, x: Tensor) -> Tensor:
        """Before a column-split product: bring the whole sequence to every rank."""
        return x

    def scatter(self, x: Tensor) -> Tensor:
        """After a row-split product: sum the ranks' parts."""
        return x


@dataclass(frozen=True)
class Axes:
    tp: Axis = field(default_factory=Axis)
    cp: Axis = field(default_factory=Axis)

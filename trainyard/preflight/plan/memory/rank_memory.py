"""The bytes of one rank by what they are for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank at some point of a step; sums of them are added field by field."""

    weights: int = 0
    """Weights in the compute dtype; under ZeRO-2 and 3 the gathered ones."""
    gradients: int = 0
    optimizer: int = 0
    """Master weights, moments, and temporary memory of the update."""
    activations: int = 0
    logits: int = 0
    """Memory of the loss, if the peak is there."""
    buffers: int = 0
    """Batches, receive buffers, buckets in flight, workspaces of libraries."""
    fragmentation: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def __add__(self, other: "RankMemory") -> "RankMemory":
        return RankMemory(**{name: size + getattr(other, name) for name, size in vars(self).items()})

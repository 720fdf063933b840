"""The parallel axes that a model is built with. Models move data between ranks only through them.

In a block, tensor parallelism communicates only in `tp.column_parallel(x, ...)` before and in `tp.reduce_output(x)`
after attention and MLP. Context parallelism communicates only in `cp.attend(q, k, v)`, or in `cp.gather_sequence(k)` on
devices that trace attention. Expert parallelism communicates only around the GEMMs of experts, in `ep.dispatch` and
`ep.combine`. On one rank every one of these is the identity, so that the same model code runs on a laptop and on a
cluster, and models never import torch.distributed. Blocks depend on the rank only through tensors, so that all ranks of
a stage trace the same graph.
"""

from dataclasses import dataclass, field

from trainyard.core.splits import ModelShard
from trainyard.parallel.context_parallel import ContextAxis
from trainyard.parallel.expert_parallel import ExpertAxis
from trainyard.parallel.tensor_parallel import TensorAxis


@dataclass(frozen=True)
class Axes:
    """The axes that a model sees; data and pipeline parallelism act outside of it."""

    tp: TensorAxis = field(default_factory=TensorAxis)
    cp: ContextAxis = field(default_factory=ContextAxis)
    ep: ExpertAxis = field(default_factory=ExpertAxis)

    @property
    def model_shard(self) -> ModelShard:
        """The part of every parameter that this rank holds."""
        return ModelShard(self.tp.size, self.tp.rank, self.ep.size, self.ep.rank)

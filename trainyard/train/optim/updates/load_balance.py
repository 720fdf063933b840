"""Balances the load of experts without a loss: the bias of a router moves by a fixed step against the load.

Wang et al., arXiv 2408.15664. The load arrives as the gradient of the bias, summed over micro batches and ranks.
"""

import torch
from torch import Tensor

from trainyard.train.optim.updates.context import StepScalars, UpdateContext


class LoadBalance:
    """Updates the parameters with a `load_step`."""

    def __init__(self, context: UpdateContext) -> None:
        self.context, self.state = context, context.state
        specs = {name: context.blueprint.spec(name) for name in self.state.names}
        self.steps = {name: spec.load_step for name, spec in specs.items() if spec.load_step}

    def take_loads(self) -> dict[str, Tensor]:
        """The loads in this rank's shard. Their gradients become 0, so that no norm and no update rule sees them."""
        loads = {}
        for name in self.steps:
            gradient = self.state.shard_view(self.state.reduced_grads, name)
            loads[name] = gradient.clone()
            gradient.zero_()
        return loads

    def update(self, loads: dict[str, Tensor], scalars: StepScalars) -> None:
        """Call after the update rule, which leaves a parameter with gradient 0 and no weight decay as it is."""
        state = self.state
        for name, step in self.steps.items():
            old = state.shard_view(state.master_weights, name).float()
            new = torch.where(scalars.finite, old - step * loads[name].float().sign(), old)
            self.context.store_weights(name, new, scalars)
            if state.copies_weights:
                state.flat.view(state.weights, name).copy_(new)

"""LAMB over the flat state of a rank (`rules/lamb.py` describes it)."""

import torch

from trainyard.train.optim.rules.lamb import Lamb
from trainyard.train.optim.updates.adamw import adam_direction_
from trainyard.train.optim.updates.context import StepScalars, UpdateContext


class LambUpdate:
    """Computes all updates, then their norms and those of the weights, then applies them."""

    def __init__(self, rule: Lamb, context: UpdateContext) -> None:
        self.context, self.state, self.config = context, context.state, context.config
        self.trust_clip = rule.options.trust_clip

    def update(self, scalars: StepScalars) -> None:
        c, state, finite = self.config, self.state, scalars.finite
        updates = torch.zeros_like(state.exp_avg)
        old_weights = state.master_weights.float()
        for name in state.names:
            gradient, exp_avg, exp_avg_sq, update, old = (
                state.shard_view(buffer, name)
                for buffer in (state.reduced_grads, state.exp_avg, state.exp_avg_sq, updates, old_weights)
            )
            constants = (self.context.weight_decay(name), c.beta1, c.beta2, c.eps)
            direction = adam_direction_(gradient, (exp_avg, exp_avg_sq), scalars[:4], constants)
            update.copy_(direction + constants[0] * old)
        # A matrix may be sharded over ranks; the norms are those of the full matrices.
        sync = self.context.replica_sync
        weight_norms, update_norms = sync.squared_norms(old_weights).sqrt(), sync.squared_norms(updates).sqrt()
        ratios = torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0)
        ratios = ratios.clamp(max=1.0) if self.trust_clip else ratios
        for index, name in enumerate(state.names):
            old, update = state.shard_view(old_weights, name), state.shard_view(updates, name)
            ratio = ratios[index] if self.context.weight_decay(name) else 1.0
            lr = scalars.at_lr_scale(self.context.lr_scale(name)).lr
            new = torch.where(finite, old - lr * ratio * update, old)
            self.context.store_weights(name, new, scalars)
        if state.copies_weights:
            state.weights.copy_(state.master_weights)

"""AdamW over flat buffers: fused kernels where the device has them, otherwise tensor code that compiles to one pass."""

from collections.abc import Callable

import torch
from torch import Tensor

from trainyard.compat import fused_adamw_, has_fused_adamw
from trainyard.train.optim.stochastic_rounding import stochastic_round_to_bf16
from trainyard.train.optim.update_rule import UpdateRule
from trainyard.train.optim.updates.context import StepScalars, UpdateContext

AdamScalars = tuple[Tensor, Tensor, Tensor, Tensor]
"""lr, gradient scale, bias corrections [2] and the flag `finite`: the first fields of StepScalars."""
AdamConstants = tuple[float, float, float, float]
"""weight_decay, beta1, beta2, eps."""


class AdamWUpdate:
    """Updates all parameters with a second moment, which is all of them unless Muon has taken the matrices."""

    def __init__(self, rule: UpdateRule, context: UpdateContext) -> None:
        self.context, self.state, self.config = context, context.state, context.config
        kernels, compile_fn = context.kernels, context.compile_fn
        self._fused, self._fused_rounding = kernels.adamw_, kernels.adamw_stochastic_rounding_
        self._compiled = compile_fn is not None
        self._adamw: Callable[..., None] = compile_fn(adamw_) if compile_fn else adamw_
        self._adamw_rounding: Callable[..., None] = (
            compile_fn(adamw_stochastic_rounding_, dynamic=True) if compile_fn else adamw_stochastic_rounding_
        )

    def update(self, scalars: StepScalars) -> None:
        if scalars.rounding_key is None:
            self._update_flat(scalars)
            return
        scaled = {span.lr_scale: scalars.at_lr_scale(span.lr_scale) for span in self.state.update_spans}
        packed = {lr_scale: each.packed() for lr_scale, each in scaled.items()}
        for name in self.state.names:
            if self.state.has(name, "exp_avg_sq"):
                lr_scale = self.context.lr_scale(name)
                self._update_with_rounding(name, scaled[lr_scale], packed[lr_scale], scalars.rounding_key)

    def _update_flat(self, step_scalars: StepScalars) -> None:
        c, state = self.config, self.state
        buffers = (
            state.weights if state.copies_weights else state.master_weights,
            *(state.master_weights, state.reduced_grads, state.exp_avg, state.exp_avg_sq),
        )
        for span in state.update_spans:
            if span.elements.start >= state.flat.shard_undecayed_end:  # without a second moment
                continue
            weight, master, gradient, exp_avg, exp_avg_sq = (buffer[span.elements] for buffer in buffers)
            decay, scalars = c.weight_decay * span.weight_decay, step_scalars.at_lr_scale(span.lr_scale)
            moments, constants = (exp_avg, exp_avg_sq), (decay, c.beta1, c.beta2, c.eps)
            if self._fused:
                self._fused(weight, master, gradient, *moments, scalars.packed(), *constants)
            # torch's kernel is also one pass, but supports neither bf16 gradients nor the copy to bf16 weights.
            elif (
                has_fused_adamw(master)
                and gradient.dtype == torch.float32
                and not (self._compiled and state.copies_weights)
            ):
                step = (scalars.update_count, scalars.lr, scalars.grad_scale, scalars.finite)
                fused_adamw_(master, gradient, *moments, *step, decay, (c.beta1, c.beta2), c.eps)
                if state.copies_weights:
                    weight.copy_(master)
            else:
                self._adamw(weight, master, gradient, moments, scalars[:4], constants)

    def _update_with_rounding(self, name: str, scalars: StepScalars, packed: Tensor, key: Tensor) -> None:
        c, state = self.config, self.state
        constants = (self.context.weight_decay(name), c.beta1, c.beta2, c.eps)
        for rounding in self.context.rounding_ranges[name]:
            weight, random = rounding.weight, (rounding.site, rounding.column_ids)
            span = slice(weight.storage_offset(), weight.storage_offset() + weight.numel())
            gradient, *moments = (
                buffer[span].view_as(weight) for buffer in (state.reduced_grads, state.exp_avg, state.exp_avg_sq)
            )
            if self._fused_rounding:
                self._fused_rounding(weight, key, rounding.row_ids, *random, gradient, *moments, packed, *constants)
            else:
                bits = rounding.row_bits(key)
                self._adamw_rounding(weight, bits, *random, gradient, tuple(moments), scalars[:4], constants)


def adam_direction_(
    gradient: Tensor, moments: tuple[Tensor, Tensor], scalars: AdamScalars, constants: AdamConstants
) -> Tensor:
    """Update the first and second moment in place, and return Adam's update direction."""
    (exp_avg, exp_avg_sq), (_, grad_scale, correction, finite), (_, beta1, beta2, eps) = moments, scalars, constants
    g = gradient.float() * grad_scale
    new_avg = exp_avg + (g - exp_avg) * (1 - beta1)
    new_avg_sq = exp_avg_sq + (g * g - exp_avg_sq) * (1 - beta2)
    direction = (new_avg / correction[0]) / ((new_avg_sq / correction[1]).sqrt() + eps)
    exp_avg.copy_(torch.where(finite, new_avg, exp_avg))
    exp_avg_sq.copy_(torch.where(finite, new_avg_sq, exp_avg_sq))
    return direction


def adamw_(
    weight: Tensor,
    master: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    scalars: AdamScalars,
    constants: AdamConstants,
) -> None:
    """In-place AdamW. `weight` is the copy of `master` in the compute dtype, or `master` itself."""
    lr, _, _, finite = scalars
    direction = adam_direction_(gradient, moments, scalars, constants)
    new = torch.where(finite, master - lr * (direction + constants[0] * master), master)
    master.copy_(new)
    if weight.dtype != master.dtype:
        weight.copy_(new)


def adamw_stochastic_rounding_(
    weight: Tensor,
    row_bits: tuple[Tensor, Tensor],
    site: Tensor,
    column_ids: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    scalars: AdamScalars,
    constants: AdamConstants,
) -> None:
    """In-place AdamW on bf16 weights without a master copy; stochastic rounding keeps the expected value exact."""
    lr, _, _, finite = scalars
    direction = adam_direction_(gradient, moments, scalars, constants)
    old = weight.float()
    new = stochastic_round_to_bf16(old - lr * (direction + constants[0] * old), row_bits, site, column_ids)
    weight.copy_(torch.where(finite, new, weight))

"""AdamW over flat buffers: fused kernels where the device has them, otherwise tensor code that compiles to one pass."""

from collections.abc import Callable

import torch
from torch import Tensor

from trainyard.compat import fused_adamw_, has_fused_adamw
from trainyard.train.optim.stochastic_rounding import stochastic_round_to_bf16
from trainyard.train.optim.update_rule import RuleContext, StepScalars, bias_correction


class AdamW:
    """Updates all parameters with a second moment, which is all of them unless Muon has taken the matrices."""

    def __init__(self, context: RuleContext) -> None:
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
        correction = bias_correction(self.config, scalars.update_count)
        packed = _pack_scalars(scalars, correction)
        for name in self.state.names:
            if self.state.has_second_moment(name):
                self._update_with_rounding(name, scalars, correction, packed, scalars.rounding_key)

    def _update_flat(self, scalars: StepScalars) -> None:
        c, state = self.config, self.state
        decay_end, end = state.flat.shard_decay_end, state.flat.shard_undecayed_end
        lr, grad_scale, finite, update_count, _ = scalars
        correction, betas = bias_correction(c, update_count), (c.beta1, c.beta2)
        buffers = (
            state.weights if state.copies_weights else state.master_weights,
            *(state.master_weights, state.reduced_grads, state.exp_avg, state.exp_avg_sq),
        )
        for span, decay in ((slice(decay_end), c.weight_decay), (slice(decay_end, end), 0.0)):
            weight, master, gradient, exp_avg, exp_avg_sq = tensors = [buffer[span] for buffer in buffers]
            if not len(weight):
                continue
            if self._fused:
                self._fused(*tensors, _pack_scalars(scalars, correction), decay, *betas, c.eps)
            # torch's kernel is also one pass, but supports neither bf16 gradients nor the copy to bf16 weights.
            elif (
                has_fused_adamw(master)
                and gradient.dtype == torch.float32
                and not (self._compiled and state.copies_weights)
            ):
                moments = (exp_avg, exp_avg_sq, update_count)
                fused_adamw_(master, gradient, *moments, lr, grad_scale, finite, decay, betas, c.eps)
                if state.copies_weights:
                    weight.copy_(master)
            else:
                self._adamw(*tensors, lr, grad_scale, correction, finite, decay, *betas, c.eps)

    def _update_with_rounding(
        self, name: str, scalars: StepScalars, correction: Tensor, packed: Tensor, key: Tensor
    ) -> None:
        c, state = self.config, self.state
        constants = (self.context.weight_decay(name), c.beta1, c.beta2, c.eps)
        for rounding in self.context.rounding_ranges[name]:
            start, count = rounding.weight.storage_offset(), rounding.weight.numel()
            gradient_and_moments = [
                buffer[start : start + count].view_as(rounding.weight)
                for buffer in (state.reduced_grads, state.exp_avg, state.exp_avg_sq)
            ]
            random = (rounding.site, rounding.column_ids)
            if self._fused_rounding:
                self._fused_rounding(
                    rounding.weight, key, rounding.row_ids, *random, *gradient_and_moments, packed, *constants
                )
                continue
            step = (scalars.lr, scalars.grad_scale, correction, scalars.finite)
            self._adamw_rounding(
                rounding.weight, rounding.row_bits(key), *random, *gradient_and_moments, *step, *constants
            )


def _pack_scalars(scalars: StepScalars, correction: Tensor) -> Tensor:
    """The [5] tensor that fused kernels read: lr, grad_scale, the two bias corrections, finite."""
    return torch.cat((torch.stack((scalars.lr, scalars.grad_scale)), correction, scalars.finite.float()[None]))


def adam_moments(
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad_scale: Tensor,
    correction: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new first and second moment, and Adam's update direction."""
    g = gradient.float() * grad_scale
    new_avg = exp_avg + (g - exp_avg) * (1 - beta1)
    new_avg_sq = exp_avg_sq + (g * g - exp_avg_sq) * (1 - beta2)
    return new_avg, new_avg_sq, (new_avg / correction[0]) / ((new_avg_sq / correction[1]).sqrt() + eps)


def adamw_(
    weight: Tensor,
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: Tensor,
    grad_scale: Tensor,
    correction: Tensor,
    finite: Tensor,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """In-place AdamW. `weight` is the copy of `master` in the compute dtype, or `master` itself."""
    new_avg, new_avg_sq, update = adam_moments(gradient, exp_avg, exp_avg_sq, grad_scale, correction, beta1, beta2, eps)
    new = torch.where(finite, master - lr * (update + weight_decay * master), master)
    exp_avg.copy_(torch.where(finite, new_avg, exp_avg))
    exp_avg_sq.copy_(torch.where(finite, new_avg_sq, exp_avg_sq))
    master.copy_(new)
    if weight.dtype != master.dtype:
        weight.copy_(new)


def adamw_stochastic_rounding_(
    weight: Tensor,
    row_bits: tuple[Tensor, Tensor],
    site: Tensor,
    column_ids: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: Tensor,
    grad_scale: Tensor,
    correction: Tensor,
    finite: Tensor,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """In-place AdamW on bf16 weights without a master copy; stochastic rounding keeps the expected value exact."""
    new_avg, new_avg_sq, update = adam_moments(gradient, exp_avg, exp_avg_sq, grad_scale, correction, beta1, beta2, eps)
    old = weight.float()
    new = stochastic_round_to_bf16(old - lr * (update + weight_decay * old), row_bits, site, column_ids)
    exp_avg.copy_(torch.where(finite, new_avg, exp_avg))
    exp_avg_sq.copy_(torch.where(finite, new_avg_sq, exp_avg_sq))
    weight.copy_(torch.where(finite, new, weight))

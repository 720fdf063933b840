"""Runs an elementwise update rule over the flat state of a rank: it gives the same weights at every layout."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trainyard.train.optim.stochastic_rounding import RoundingRange, stochastic_round_to_bf16
from trainyard.train.optim.update_rule import CHUNK_ELEMENTS, UpdateRule
from trainyard.train.optim.updates.context import StepScalars, UpdateContext


class ElementwiseUpdate:
    """Calls `UpdateRule.update` on parts of the shard, compiled or some elements at a time."""

    def __init__(self, rule: UpdateRule, context: UpdateContext) -> None:
        self.rule, self.context, self.state = rule, context, context.state
        compile_fn = context.compile_fn
        self._chunk = self.state.flat.shard_size if compile_fn else CHUNK_ELEMENTS
        self._update: Callable[..., None] = compile_fn(self._update_part) if compile_fn else self._update_part
        self._update_rounded: Callable[..., None] = (
            compile_fn(self._update_with_rounding, dynamic=True) if compile_fn else self._update_with_rounding
        )

    def update(self, scalars: StepScalars) -> None:
        if scalars.rounding_key is not None:
            for name in self.state.names:
                scaled = scalars.at_lr_scale(self.context.lr_scale(name))
                for part in self.context.rounding_ranges[name]:
                    bits = part.row_bits(scalars.rounding_key)
                    self._update_rounded(part, bits, self._buffers(part), scaled, self.context.weight_decay(name))
            return
        state = self.state
        weights = state.weights if state.copies_weights else state.master_weights
        for span, decay, lr_scale in self._spans():
            buffers = tuple(buffer[span] for buffer in state.buffers.values())
            inputs = weights[span], state.master_weights[span], state.reduced_grads[span]
            self._update(*inputs, buffers, scalars.at_lr_scale(lr_scale), decay)

    def _spans(self) -> Iterator[tuple[slice, float, float]]:
        """Parts of the shard, each with its weight decay and its multiple of the learning rate."""
        for elements, decays, lr_scale in self.state.update_spans:
            for first in range(elements.start, elements.stop, self._chunk):
                part = slice(first, min(first + self._chunk, elements.stop))
                yield part, self.context.config.weight_decay * decays, lr_scale

    def _buffers(self, part: RoundingRange) -> tuple[Tensor, ...]:
        """Gradient and state of a range of bf16 weights."""
        start = part.weight.storage_offset()
        span = slice(start, start + part.weight.numel())
        return tuple(buffer[span] for buffer in (self.state.reduced_grads, *self.state.buffers.values()))

    def _new_values(
        self, weight: Tensor, gradient: Tensor, buffers: tuple[Tensor, ...], scalars: StepScalars, decay: float
    ) -> Tensor:
        """The new weight, after the state has been updated in place."""
        state = dict(zip(self.state.buffers, buffers, strict=True))
        gradient = gradient.float() * scalars.grad_scale
        new, new_state = self.rule.update(weight, gradient, state, scalars.lr, decay, scalars.update_count)
        kept = [torch.where(scalars.finite, new_state[name], buffer) for name, buffer in state.items()]
        for buffer, value in zip(buffers, kept, strict=True):  # after all are computed: they may refer to each other
            buffer.copy_(value)
        return torch.where(scalars.finite, new, weight)

    def _update_part(
        self,
        weight: Tensor,
        master: Tensor,
        gradient: Tensor,
        buffers: tuple[Tensor, ...],
        scalars: StepScalars,
        decay: float,
    ) -> None:
        """Update a part of the shard. `weight` is the copy of `master` in the compute dtype, or `master` itself."""
        new = self._new_values(master, gradient, buffers, scalars, decay)
        master.copy_(new)
        if weight.dtype != master.dtype:
            weight.copy_(new)

    def _update_with_rounding(
        self,
        part: RoundingRange,
        row_bits: tuple[Tensor, Tensor],
        buffers: tuple[Tensor, ...],
        scalars: StepScalars,
        decay: float,
    ) -> None:
        """Update bf16 weights without a master copy."""
        gradient, *state = buffers
        new = self._new_values(part.weight.float().flatten(), gradient, tuple(state), scalars, decay)
        rounded = stochastic_round_to_bf16(new.view_as(part.weight), row_bits, part.site, part.column_ids)
        part.weight.copy_(torch.where(scalars.finite, rounded, part.weight))

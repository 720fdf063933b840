"""Update rules of the user: an elementwise function, which therefore gives the same weights at every layout."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trainyard.compat import disable_fake_tensors
from trainyard.config.optimizer_schema import OptimizerSection
from trainyard.core.errors import UserError
from trainyard.core.user_code import check_call, describe_object, import_subclass, is_user_path, make_instance
from trainyard.train.optim.rules.update_rule import RuleContext, StepScalars
from trainyard.train.optim.stochastic_rounding import RoundingRange, stochastic_round_to_bf16

CHUNK_ELEMENTS = 1 << 24
"""Elements per call of a rule that is not compiled: its temporary tensors have 64 MiB each."""
RESERVED_NAMES = ("weights", "first", "second", "random")
"""Names in the files of a checkpoint."""
ARGUMENTS = ("weight", "gradient", "state", "lr", "weight_decay", "updates")
CHECK_LR, CHECK_RTOL, CHECK_ATOL = 0.1, 1e-5, 1e-6
"""Learning rate of the check of a rule, and its tolerances: vector instructions may round the last elements
differently."""


class UpdateRule:
    """An optimizer of your own: `optimizer.kind: "my_module:MyRule"`. Keyword arguments of its constructor come from
    optimizer.options.

    `state_names` names its state buffers: fp32, as many elements as the weights, zeros at first, in checkpoints and
    converted to any layout. `exp_avg` and `exp_avg_sq` are those of AdamW, so that a run may change between the two.
    """

    state_names: tuple[str, ...] = ()

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        lr: Tensor,
        weight_decay: float,
        updates: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the new weight and the new state by name, and change no argument.

        `weight`, `gradient` and each state are flat fp32 tensors with some elements of the model: any cut is possible,
        so each result may depend on its own element only. A weight of 0 whose gradient and state are 0 must stay 0.
        `gradient` is the mean over the global batch, clipped. `lr` is the learning rate of the step and `updates` the
        number of updates including this one; both are tensors without dimensions. `weight_decay` is 0 for norms and
        biases. Skipped steps, master weights and stochastic rounding are no concern of the rule.
        """
        raise NotImplementedError


def load_update_rule(section: OptimizerSection) -> UpdateRule | None:
    """The rule that optimizer.kind names as `module:Class`, checked on a few numbers; None for a built-in kind."""
    path = section.kind
    if not is_user_path(path):
        return None
    label = f"optimizer.kind={path}"
    rule_class = import_subclass(path, "optimizer.kind", UpdateRule)
    rule = make_instance(rule_class, path, "optimizer.options", section.options)
    if not isinstance(rule.state_names, tuple | list) or not all(isinstance(name, str) for name in rule.state_names):
        raise UserError(f"{label}: state_names must be a tuple of names, such as ('momentum',)")
    for name in rule.state_names:
        if not re.fullmatch(r"[a-z]\w*", name) or name in RESERVED_NAMES or list(rule.state_names).count(name) > 1:
            raise UserError(f"{label}: state_names has {name!r}: not a name of its own, such as momentum")
    check_call(rule.update, ARGUMENTS, f"{label}: update")
    with disable_fake_tensors(), torch.no_grad():
        _check_on_numbers(rule, label)
    return rule


def _check_on_numbers(rule: UpdateRule, label: str) -> None:
    """Raise UserError unless the rule is elementwise, changes no argument and keeps zeros, over two updates."""
    generator = torch.Generator().manual_seed(0)
    weight, *gradients = (torch.randn(12, generator=generator) for _ in range(3))
    state = {name: torch.zeros(12) for name in rule.state_names}
    scale = torch.tensor([1.0, 100.0]).repeat_interleave(6)  # the halves differ in norm, mean and largest element
    weight[5] = 0.0
    for number, gradient in enumerate(gradients, 1):
        gradient *= scale
        gradient[5] = 0.0
        inputs = (weight, gradient, *state.values())
        before = [tensor.clone() for tensor in inputs]
        result = _call(rule, label, weight, gradient, state, number)
        if not all(map(torch.equal, inputs, before)):
            raise UserError(f"{label}: update changes its arguments in place; return new tensors")
        halves = [
            _call(rule, label, weight[half], gradient[half], {k: v[half] for k, v in state.items()}, number)
            for half in (slice(6), slice(6, 12))
        ]
        for name, value in result.items():
            joined = torch.cat([half[name] for half in halves])
            if not torch.allclose(value, joined, CHECK_RTOL, CHECK_ATOL, equal_nan=True):
                raise UserError(
                    f"{label}: update is not elementwise: {name} of an element depends on other elements, which other "
                    "ranks may have"
                )
        if result["weight"][5] != 0:
            raise UserError(f"{label}: update moves a weight of 0 whose gradient is 0; such padding must stay 0")
        weight, state = result["weight"], {name: result[name] for name in state}


def _call(
    rule: UpdateRule, label: str, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], number: int
) -> dict[str, Tensor]:
    """The results of one update by name, `weight` among them."""
    returned: Any = rule.update(weight, gradient, state, torch.tensor(CHECK_LR), 0.1, torch.tensor(float(number)))
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
        raise UserError(f"{label}: update returned {describe_object(returned)}; expected (weight, {{name: state}})")
    if set(returned[1]) != set(rule.state_names):
        found, names = ", ".join(map(str, returned[1])) or "nothing", ", ".join(rule.state_names) or "nothing"
        raise UserError(f"{label}: update returned the state of {found}; state_names has {names}")
    result = {"weight": returned[0], **returned[1]}
    for name, value in result.items():
        kind = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else describe_object(value)
        if kind != (expected := f"{weight.dtype} {list(weight.shape)}"):
            raise UserError(f"{label}: update returned {name} as {kind}; expected {expected}")
    return result


class ElementwiseUpdate:
    """Runs a user's rule over the flat state of a rank."""

    def __init__(self, rule: UpdateRule, context: RuleContext) -> None:
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
                for part in self.context.rounding_ranges[name]:
                    bits = part.row_bits(scalars.rounding_key)
                    self._update_rounded(part, bits, self._buffers(part), scalars, self.context.weight_decay(name))
            return
        state = self.state
        weights = state.weights if state.copies_weights else state.master_weights
        for span, decay in self._spans():
            buffers = tuple(buffer[span] for buffer in state.buffers.values())
            self._update(weights[span], state.master_weights[span], state.reduced_grads[span], buffers, scalars, decay)

    def _spans(self) -> Iterator[tuple[slice, float]]:
        """Parts of the shard, each with its weight decay."""
        decay_end, end = self.state.flat.shard_decay_end, self.state.flat.shard_size
        for start, stop, decay in ((0, decay_end, self.context.config.weight_decay), (decay_end, end, 0.0)):
            for first in range(start, stop, self._chunk or 1):
                yield slice(first, min(first + self._chunk, stop)), decay

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

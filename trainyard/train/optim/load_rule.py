"""Makes the update rule of a run, and checks the elementwise ones that are not built in."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from trainyard.compat import disable_fake_tensors
from trainyard.config.optimizer_schema import OptimizerSection
from trainyard.config.registries import UPDATE_RULES
from trainyard.core.errors import UserError
from trainyard.core.section import Section
from trainyard.core.user_code import check_call, describe_object, make_instance
from trainyard.train.optim.update_rule import UpdateRule

RESERVED_NAMES = ("weights", "first", "second", "random")
"""Names in the files of a checkpoint."""
ARGUMENTS = ("weight", "gradient", "state", "lr", "weight_decay", "updates")
CHECK_LR, CHECK_RTOL, CHECK_ATOL = 0.1, 1e-5, 1e-6
"""Learning rate of the check of a rule, and its tolerances: vector instructions may round the last elements
differently."""


def load_update_rule(section: OptimizerSection) -> UpdateRule:
    """The rule that optimizer.kind names. One that is not built in is checked on a few numbers."""
    path, rule_class = section.kind, UPDATE_RULES.find(section.kind)
    if path in UPDATE_RULES.built_in:
        names = rule_class.keys.model_fields if rule_class.keys else ()
        return rule_class(**{name: getattr(section, name) for name in names})
    if rule_class.keys:
        _check_options(rule_class.keys, section.options)
    rule: UpdateRule = make_instance(rule_class, path, "optimizer.options", section.options)
    _check_rule(rule, f"optimizer.kind={path}")
    return rule


def _check_options(keys: type[Section], options: dict[str, Any]) -> None:
    try:
        keys(**options)
    except ValidationError as error:
        mistake = error.errors()[0]
        key = ".".join(map(str, ("optimizer.options", *mistake["loc"])))
        raise UserError(f"{key}={mistake['input']}: {mistake['msg']}; known: {', '.join(keys.model_fields)}") from None


def _check_rule(rule: UpdateRule, label: str) -> None:
    if not isinstance(rule.state_names, tuple | list) or not all(isinstance(name, str) for name in rule.state_names):
        raise UserError(f"{label}: state_names must be a tuple of names, such as ('momentum',)")
    for name in rule.state_names:
        if not re.fullmatch(r"[a-z]\w*", name) or name in RESERVED_NAMES or list(rule.state_names).count(name) > 1:
            raise UserError(f"{label}: state_names has {name!r}: not a name of its own, such as momentum")
    if rule.implementation == UpdateRule.implementation:
        check_call(rule.update, ARGUMENTS, f"{label}: update")
        with disable_fake_tensors(), torch.no_grad():
            _check_on_numbers(rule, label)


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

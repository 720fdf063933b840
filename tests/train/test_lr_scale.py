"""Multiples of the learning rate and parameters that are not trained, for every update rule."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tests.support import configs
from tests.support.frozen_linear import frozen
from tests.train import test_optimizers as optimizers
from trainyard.core.counter_rng import key64, normal_slice
from trainyard.train.optim.optimizer import Optimizer

SCALE = 3.0


def make_optimizer(lr_scale: float, precision: str = "fp32", rule: str = "adamw") -> Optimizer:
    section = {"kind": rule, "lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.0}
    model = frozen(configs.LLAMA, lr_scale=lr_scale)
    return optimizers.build(configs.tiny_config(model, optimizer=section, precision={"kind": precision}))[1]


def set_gradients(optimizer: Optimizer, step: int) -> None:
    """Gradients that do not depend on the order of parameters."""
    for name in optimizer.state.names:
        view = optimizers.gradient(optimizer, name)
        view.copy_(
            normal_slice(key64(step, name), view.numel(), slice(0, 1), slice(0, view.numel()), "cpu").view_as(view)
        )


def trained(
    lr_scale: float, lr: float, precision: str = "fp32", rule: str = "adamw", steps: int = 1
) -> dict[str, Tensor]:
    """The weights after some steps."""
    optimizer = make_optimizer(lr_scale, precision, rule)
    for step in range(1, steps + 1):
        set_gradients(optimizer, step)
        optimizers.update(optimizer, step, lr)
    return optimizers.weights(optimizer)


def lr_scale_of(optimizer: Optimizer, name: str) -> float:
    return optimizer.update.context.blueprint.spec(name).lr_scale  # type: ignore[attr-defined]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adamw_equals_torch(precision: str) -> None:
    optimizer = make_optimizer(SCALE, precision)
    copies = {name: nn.Parameter(value) for name, value in optimizers.weights(optimizer).items()}
    scales = {name: lr_scale_of(optimizer, name) for name in copies}
    assert set(scales.values()) == {1.0, SCALE}
    groups = [
        {"params": [copy], "lr": 1e-2 * scales[name], "weight_decay": 0.1 if copy.ndim > 1 else 0.0}
        for name, copy in copies.items()
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(1, 6):
        set_gradients(optimizer, step)
        for name, copy in copies.items():
            copy.grad = optimizers.gradient(optimizer, name).float().clone()
        norm = torch.nn.utils.get_total_norm([copy.grad for copy in copies.values()])
        assert optimizers.update(optimizer, step) == pytest.approx(float(norm), rel=1e-5)
        reference.step()
    for name, value in optimizers.weights(optimizer).items():
        torch.testing.assert_close(value, copies[name].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["adamw", "lamb", "muon", "tests.support.user_code:Momentum"])
@pytest.mark.parametrize("precision", ["fp32", "bf16_sr"])
def test_scaled_parameters_train_at_a_multiple(rule: str, precision: str) -> None:
    plain, at_multiple = (trained(1.0, lr, precision, rule, steps=2) for lr in (1e-2, 1e-2 * SCALE))
    optimizer = make_optimizer(SCALE, precision, rule)
    for name, value in trained(SCALE, 1e-2, precision, rule, steps=2).items():
        expected, other = (plain, at_multiple) if lr_scale_of(optimizer, name) == 1.0 else (at_multiple, plain)
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
        assert not torch.equal(value, other[name])


def test_parameters_of_one_rate_are_updated_in_one_pass() -> None:
    plain, scaled = (make_optimizer(lr_scale).state for lr_scale in (1.0, SCALE))
    assert [(span.weight_decay, span.lr_scale) for span in plain.update_spans] == [(True, 1.0), (False, 1.0)]
    assert len(scaled.update_spans) == len({(span.weight_decay, span.lr_scale) for span in scaled.update_spans})
    for state in (plain, scaled):
        spans = [span.elements for span in state.update_spans]
        assert [spans[0].start, spans[-1].stop] == [0, state.flat.shard_size]
        assert all(before.stop == after.start for before, after in pairwise(spans))

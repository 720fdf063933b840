"""Update rules against torch.optim and a plain LAMB: clipping, weight decay, stochastic rounding, skipped steps."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tests.support import configs
from trainyard import models
from trainyard.config.schema import Config
from trainyard.core.splits import FULL_MODEL
from trainyard.devices.cpu import CpuDevice
from trainyard.kernels.reference import Kernels
from trainyard.models.init import initial_values
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.process_group import Group
from trainyard.parallel.rank_context import RankContext
from trainyard.train.optim.flat_state import FlatState, local_shapes
from trainyard.train.optim.gradient_sync import GradientSync
from trainyard.train.optim.load_rule import load_update_rule
from trainyard.train.optim.lr_schedule import learning_rate
from trainyard.train.optim.optimizer import Optimizer
from trainyard.train.optim.stochastic_rounding import rounding_ranges


def make_optimizer(
    precision: str = "fp32", rule: str = "adamw", family: str = "llama", **options: object
) -> tuple[nn.Module, Optimizer]:
    options = {"kind": rule, "lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.0, **options}
    return build(configs.tiny_config(family, optimizer=options, precision={"kind": precision}, train={"seed": 7}))


def build(config: Config) -> tuple[nn.Module, Optimizer]:
    blueprint = models.blueprint_of(config.model)
    model = models.build_model(config.model)
    context = RankContext(CpuDevice(), Mesh(Layout()), blueprint, Kernels())
    state = FlatState(local_shapes([model]), context, config.precision, load_update_rule(config.optimizer))
    state.load_values(initial_values(blueprint, 0))
    return model, Optimizer(state, GradientSync(state, [model], context), context, config.optimizer, config.train.seed)


def set_gradients(optimizer: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name in optimizer.state.names:
        view = gradient(optimizer, name)
        view.copy_(torch.randn(view.shape, generator=generator))


def gradient(optimizer: Optimizer, name: str) -> Tensor:
    return optimizer.state.shard_view(optimizer.state.gradients, name)


def master(optimizer: Optimizer, name: str) -> Tensor:
    return optimizer.state.shard_view(optimizer.state.master_weights, name)


def weights(optimizer: Optimizer) -> dict[str, Tensor]:
    return {name: master(optimizer, name).clone() for name in optimizer.state.names}


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    state = optimizer.state
    return [tensor.clone() for tensor in (state.master_weights, state.weights, state.exp_avg, state.exp_avg_sq)]


def update(optimizer: Optimizer, step: int, lr: float = 1e-2, scale: float = 1.0, loss: float = 1.0) -> float:
    """Returns the gradient norm."""
    return float(optimizer.step(torch.tensor(lr), torch.tensor(scale), torch.tensor(loss), step))


def torch_adamw(optimizer: Optimizer) -> tuple[dict[str, nn.Parameter], torch.optim.AdamW]:
    """torch.optim.AdamW on copies of the weights, with weight decay on matrices only."""
    copies = {name: nn.Parameter(value) for name, value in weights(optimizer).items()}
    groups = [
        {"params": [p for p in copies.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in copies.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return copies, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adamw_equals_torch(precision: str, max_grad_norm: float) -> None:
    model, optimizer = make_optimizer(precision, max_grad_norm=max_grad_norm)
    copies, reference = torch_adamw(optimizer)
    for step in range(1, 6):
        set_gradients(optimizer, step)
        for name, copy in copies.items():
            copy.grad = gradient(optimizer, name).float().clone() * 0.5
        norm = torch.nn.utils.clip_grad_norm_(copies.values(), max_grad_norm or float("inf"))
        assert update(optimizer, step, scale=0.5) == pytest.approx(float(norm), rel=1e-5)
        reference.step()
    for name, value in weights(optimizer).items():
        torch.testing.assert_close(value, copies[name].detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():  # the model's weights are the master weights, rounded
        assert torch.equal(parameter, master(optimizer, name).to(parameter.dtype))


@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_norms_and_biases_have_no_weight_decay(family: str) -> None:
    _, optimizer = make_optimizer(family=family)
    before = weights(optimizer)
    optimizer.zero_grad()
    update(optimizer, 1)
    for name, value in weights(optimizer).items():
        if value.ndim == 1:
            assert torch.equal(value, before[name]), name
        else:
            torch.testing.assert_close(value, before[name] * (1 - 1e-2 * 0.1))


def test_lamb_equals_its_definition() -> None:
    _, optimizer = make_optimizer(rule="lamb", weight_decay=0.01)
    expected = weights(optimizer)
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in expected.items()}
    for step in range(1, 4):
        set_gradients(optimizer, step)
        for name, w in expected.items():
            g = gradient(optimizer, name).clone()
            m, v = moments[name]
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            moments[name] = (m, v)
            direction = (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
            if w.ndim > 1:
                direction = direction + 0.01 * w
                direction = direction * w.norm() / direction.norm()
            expected[name] = w - 1e-2 * direction
        update(optimizer, step)
    for name, value in weights(optimizer).items():
        torch.testing.assert_close(value, expected[name], rtol=2e-5, atol=1e-6)


def test_lamb_trust_clip_limits_the_trust_ratio() -> None:
    distances = []
    for trust_clip in (False, True):
        _, optimizer = make_optimizer(rule="lamb", trust_clip=trust_clip)
        name = "embedding.weight"
        master(optimizer, name).mul_(1000)
        before = weights(optimizer)[name]
        set_gradients(optimizer, 0)
        update(optimizer, 1)
        distances.append((weights(optimizer)[name] - before).norm().item())
    assert distances[1] < 0.2 * distances[0]


def test_stochastic_rounding_is_unbiased_and_reproducible() -> None:
    """Updates far below the spacing of bf16 move the weights by their sum on average, unlike rounding to nearest."""
    runs = []
    for _ in range(2):
        _, optimizer = make_optimizer("bf16_sr", weight_decay=0.0)
        start = optimizer.state.weights.float()
        for step in range(1, 41):
            optimizer.state.gradients.fill_(1.0)
            update(optimizer, step, lr=1e-6)
        runs.append(optimizer.state.weights.clone())
        assert optimizer.state.weights.dtype == torch.bfloat16
        assert optimizer.state.exp_avg.dtype == torch.float32
    assert torch.equal(*runs)
    matrices = slice(optimizer.state.flat.shard_decay_end)
    used = start[matrices] != 0
    moved = (runs[0].float() - start)[matrices].double()
    assert moved[used].mean().item() == pytest.approx(-40e-6, rel=0.05)
    nearest = start.clone()
    for _ in range(40):
        nearest = (nearest - 1e-6).bfloat16().float()
    assert abs((nearest - start)[matrices][used].double().mean().item() + 40e-6) > 5e-6


def test_stochastic_rounding_does_not_depend_on_fusing() -> None:
    rounded = []
    for fused in (True, False):
        sections = {"optimizer": {"lr": 1e-2, "max_grad_norm": 0.0}, "precision": {"kind": "bf16_sr"}}
        _, optimizer = build(configs.tiny_config({**configs.LLAMA, "fuse_qkv": fused}, **sections))
        optimizer.state.gradients.fill_(1.0)
        update(optimizer, 1)
        names = ["layers.0.attention.qkv.weight"] if fused else [f"layers.0.attention.{x}.weight" for x in "qkv"]
        rounded.append(torch.cat([master(optimizer, name) for name in names]))
    assert torch.equal(*rounded)


def test_rounding_covers_every_row_of_a_shard_and_nothing_of_an_empty_one() -> None:
    config = configs.tiny_config("bert", precision={"kind": "bf16_sr"})
    blueprint = models.family_of(config.model).blueprint(config.model)
    shapes = {name: blueprint.local_shape(name) for name in blueprint.parameter_names()}
    mesh = Mesh(Layout(dp=4, zero=1), 3, dp_cp=Group((0, 1, 2, 3), 3))
    context = RankContext(CpuDevice(), mesh, blueprint, Kernels())
    state = FlatState(shapes, context, config.precision, load_update_rule(config.optimizer))
    for name in state.names:
        ranges = rounding_ranges(state, blueprint, FULL_MODEL, name)
        assert sum(part.weight.numel() for part in ranges) == state.shard_view(state.master_weights, name).numel()
    assert not rounding_ranges(state, blueprint, FULL_MODEL, "nsp.bias")  # two rows on four ranks


@pytest.mark.parametrize(
    ("precision", "rule"),
    [
        ("fp32", "adamw"),
        ("bf16", "adamw"),
        ("bf16_sr", "adamw"),
        ("fp32", "lamb"),
        ("fp32", "muon"),
        ("bf16_sr", "muon"),
    ],
)
@pytest.mark.parametrize("nonfinite", ["gradient", "loss"])
def test_nonfinite_step_is_skipped_and_its_gradient_named(precision: str, rule: str, nonfinite: str) -> None:
    _, optimizer = make_optimizer(precision, rule)
    set_gradients(optimizer, 0)
    update(optimizer, 1)
    before = state_tensors(optimizer)
    set_gradients(optimizer, 1)
    if nonfinite == "gradient":
        gradient(optimizer, "layers.1.mlp.down.weight")[0, 0] = float("inf")
    update(optimizer, 2, loss=1.0 if nonfinite == "gradient" else float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(before, state_tensors(optimizer), strict=True))
    assert optimizer.guard.nonfinite_names() == (["layers.1.mlp.down.weight"] if nonfinite == "gradient" else [])
    assert optimizer.guard.skip_counts.tolist() == [1, 1]
    assert optimizer.guard.update_count.item() == 1
    set_gradients(optimizer, 2)
    update(optimizer, 3)
    assert optimizer.guard.skip_counts.tolist() == [1, 0]
    assert not torch.equal(optimizer.state.weights, before[1])


def test_gradients_of_bf16_weights_accumulate_in_fp32() -> None:
    model, optimizer = make_optimizer("bf16")
    weight = model.get_parameter("norm.weight")
    for _ in range(300):
        (weight.sum() * 1.0).backward()
    assert (gradient(optimizer, "norm.weight") == 300).all()  # a bf16 sum stops at 256
    assert weight.grad is None


SCHEDULES = {
    "cosine": {1: 0.1, 10: 1.0, 55: 0.55, 100: 0.1},
    "linear": {1: 0.1, 10: 1.0, 55: 0.55, 100: 0.1},
    "constant": {1: 0.1, 10: 1.0, 100: 1.0},
    "wsd": {1: 0.1, 10: 1.0, 90: 1.0, 95: 0.55, 100: 0.1},
}
"""Learning rate at some updates."""


@pytest.mark.parametrize("kind", SCHEDULES)
def test_learning_rate_schedules(kind: str) -> None:
    schedule = {"kind": kind, "warmup_steps": 10, "min_lr": 0.1}
    config = configs.tiny_config(train={"steps": 100}, optimizer={"lr": 1.0}, schedule=schedule)
    for step, expected in SCHEDULES[kind].items():
        assert learning_rate(config, step) == pytest.approx(expected, rel=1e-9), step
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert max(rates) == 1.0
    assert all(a >= b for a, b in pairwise(rates[9:]))


def test_decay_steps_may_differ_from_the_length_of_the_run() -> None:
    def config(**schedule: object) -> Config:
        return configs.tiny_config(train={"steps": 100}, schedule={"kind": "linear", **schedule}, optimizer={"lr": 1.0})

    assert learning_rate(config(decay_steps=200), 100) == pytest.approx(0.5)
    assert learning_rate(config(decay_steps=50, min_lr=0.2), 80) == pytest.approx(0.2)

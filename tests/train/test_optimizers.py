"""Updates against torch's AdamW and a plain LAMB; clipping, decay, rounding, and steps that must not count."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.support import configs
from trainyard import models
from trainyard.config.schema import Config
from trainyard.devices.cpu import CpuDevice
from trainyard.models.init import initial_values
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import Mesh
from trainyard.train.lr_schedule import learning_rate
from trainyard.train.optim.optimizer import Optimizer


def make(kind: str = "fp32", family: str = "llama", **options: object) -> tuple[nn.Module, Optimizer]:
    options = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.0, **options}
    config = configs.tiny_config(family, optimizer=options, precision={"kind": kind}, train={"seed": 7})
    return built(config)


def built(config: Config) -> tuple[nn.Module, Optimizer]:
    blueprint = models.family_of(config.model).blueprint(config.model)
    model = models.build_model(config.model)
    return model, Optimizer([model], blueprint, initial_values(blueprint, 0), config, CpuDevice(), Mesh(Layout()))


def gradients(optimizer: Optimizer, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name in optimizer.names:
        view = optimizer.shard_view(optimizer.gradients, name)
        view.copy_(torch.randn(view.shape, generator=generator) * size)


def update(optimizer: Optimizer, number: int, lr: float = 1e-2, scale: float = 1.0, loss: float = 1.0) -> float:
    return float(optimizer.step(torch.tensor(lr), torch.tensor(scale), torch.tensor(loss), number))


def weights(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {name: optimizer.shard_view(optimizer.master_weights, name).clone() for name in optimizer.names}


def reference(optimizer: Optimizer) -> tuple[dict[str, nn.Parameter], torch.optim.AdamW]:
    """torch's AdamW with decay on matrices alone."""
    copies = {name: nn.Parameter(value) for name, value in weights(optimizer).items()}
    groups = [
        {"params": [p for p in copies.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in copies.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return copies, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_adamw_is_torchs(kind: str, clip: float) -> None:
    model, optimizer = make(kind, max_grad_norm=clip)
    copies, torch_adamw = reference(optimizer)
    for number in range(1, 6):
        gradients(optimizer, number)
        for name, copy in copies.items():
            copy.grad = optimizer.shard_view(optimizer.gradients, name).float().clone() * 0.5
        norm = torch.nn.utils.clip_grad_norm_(copies.values(), clip if clip else float("inf"))
        assert update(optimizer, number, scale=0.5) == pytest.approx(float(norm), rel=1e-5)
        torch_adamw.step()
    for name, value in weights(optimizer).items():
        torch.testing.assert_close(value, copies[name].detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():  # what the model computes with is the master, rounded
        assert torch.equal(parameter, optimizer.shard_view(optimizer.master_weights, name).to(parameter.dtype))


def test_decay_leaves_out_norms_and_biases() -> None:
    for family in configs.TINY_MODELS:
        _, optimizer = make(family=family)
        before = weights(optimizer)
        optimizer.zero_grad()
        update(optimizer, 1)
        for name, value in weights(optimizer).items():
            if value.ndim == 1:
                assert torch.equal(value, before[name]), name
            else:
                torch.testing.assert_close(value, before[name] * (1 - 1e-2 * 0.1))


def test_lamb_by_the_book() -> None:
    _, optimizer = make(kind="fp32", weight_decay=0.01)
    optimizer.config = optimizer.config.model_copy(update={"kind": "lamb"})
    before = weights(optimizer)
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in before.items()}
    for number in range(1, 4):
        gradients(optimizer, number)
        for name, w in before.items():
            g = optimizer.shard_view(optimizer.gradients, name).clone()
            m, v = moments[name]
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            moments[name] = (m, v)
            direction = (m / (1 - 0.9**number)) / ((v / (1 - 0.95**number)).sqrt() + 1e-8)
            if w.ndim > 1:
                direction = direction + 0.01 * w
                direction = direction * w.norm() / direction.norm()
            before[name] = w - 1e-2 * direction
        update(optimizer, number)
    for name, value in weights(optimizer).items():
        torch.testing.assert_close(value, before[name], rtol=2e-5, atol=1e-6)


def test_lamb_trust_clip() -> None:
    moved = []
    for trust_clip in (False, True):
        _, optimizer = make(kind="fp32", trust_clip=trust_clip)
        optimizer.config = optimizer.config.model_copy(update={"kind": "lamb"})
        name = "embedding.weight"
        optimizer.shard_view(optimizer.master_weights, name).mul_(1000)
        before = weights(optimizer)[name]
        gradients(optimizer, 0)
        update(optimizer, 1)
        moved.append((weights(optimizer)[name] - before).norm().item())
    assert moved[1] < 0.2 * moved[0]


def test_rounding_is_right_on_average_and_by_element() -> None:
    """An update far below bf16's step moves weights by it on average; the same step rounds the same way again."""
    runs = []
    for _ in range(2):
        _, optimizer = make("bf16_sr", weight_decay=0.0)
        start = optimizer.weights.float()
        for number in range(1, 41):
            optimizer.gradients.fill_(1.0)
            update(optimizer, number, lr=1e-6)
        runs.append(optimizer.weights.clone())
        assert optimizer.weights.dtype == torch.bfloat16
        assert optimizer.exp_avg.dtype == torch.float32
    assert torch.equal(*runs)
    moved = (runs[0].float() - start)[: optimizer.flat.shard_decay_end].double()
    used = start[: optimizer.flat.shard_decay_end] != 0
    assert moved[used].mean().item() == pytest.approx(-40e-6, rel=0.05)
    nearest = start.clone()
    for _ in range(40):
        nearest = (nearest - 1e-6).bfloat16().float()
    assert (
        abs((nearest - start)[: optimizer.flat.shard_decay_end][used].double().mean().item() + 40e-6) > 5e-6
    )  # plain rounding is not


def test_rounding_follows_parts_not_fusing() -> None:
    rounded = []
    for fused in (True, False):
        own = {"optimizer": {"lr": 1e-2, "max_grad_norm": 0.0}, "precision": {"kind": "bf16_sr"}}
        _, optimizer = built(configs.tiny_config({**configs.LLAMA, "fuse_qkv": fused}, **own))
        optimizer.gradients.fill_(1.0)
        update(optimizer, 1)
        names = ["layers.0.attention.qkv.weight"] if fused else [f"layers.0.attention.{x}.weight" for x in "qkv"]
        rounded.append(torch.cat([optimizer.shard_view(optimizer.weights, name) for name in names]))
    assert torch.equal(*rounded)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16_sr", "lamb"])
@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_named(kind: str, what: str) -> None:
    _, optimizer = make("fp32" if kind == "lamb" else kind)
    if kind == "lamb":
        optimizer.config = optimizer.config.model_copy(update={"kind": "lamb"})
    gradients(optimizer, 0)
    update(optimizer, 1)
    before = [
        tensor.clone()
        for tensor in (optimizer.master_weights, optimizer.weights, optimizer.exp_avg, optimizer.exp_avg_sq)
    ]
    gradients(optimizer, 1)
    if what == "gradient":
        optimizer.shard_view(optimizer.gradients, "layers.1.mlp.down.weight")[0, 0] = float("inf")
    update(optimizer, 2, loss=1.0 if what == "gradient" else float("nan"))
    after = [optimizer.master_weights, optimizer.weights, optimizer.exp_avg, optimizer.exp_avg_sq]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert optimizer.nonfinite_names() == (["layers.1.mlp.down.weight"] if what == "gradient" else [])
    assert optimizer.skip_counts.tolist() == [1, 1]
    assert optimizer.update_count.item() == 1
    gradients(optimizer, 2)
    update(optimizer, 3)
    assert optimizer.skip_counts.tolist() == [1, 0]
    assert not torch.equal(optimizer.weights, before[1])


def test_gradients_accumulate_in_fp32_beside_bf16_weights() -> None:
    model, optimizer = make("bf16")
    weight = model.get_parameter("norm.weight")
    for _ in range(300):
        (weight.sum() * 1.0).backward()
    assert (optimizer.shard_view(optimizer.gradients, "norm.weight") == 300).all()  # bf16 sums stop at 256
    assert weight.grad is None


SCHEDULES = {
    "cosine": {1: 0.1, 10: 1.0, 55: 0.55, 100: 0.1},
    "linear": {1: 0.1, 10: 1.0, 55: 0.55, 100: 0.1},
    "constant": {1: 0.1, 10: 1.0, 100: 1.0},
    "wsd": {1: 0.1, 10: 1.0, 90: 1.0, 95: 0.55, 100: 0.1},
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules(kind: str) -> None:
    config = configs.tiny_config(
        train={"steps": 100}, optimizer={"lr": 1.0}, schedule={"kind": kind, "warmup_steps": 10, "min_lr": 0.1}
    )
    for update_number, wanted in SCHEDULES[kind].items():
        assert learning_rate(config, update_number) == pytest.approx(wanted, rel=1e-9), update_number
    rates = [learning_rate(config, number) for number in range(1, 101)]
    assert max(rates) == 1.0
    assert all(a >= b for a, b in pairwise(rates[9:]))


def test_decay_steps_longer_or_shorter_than_the_run() -> None:
    long = configs.tiny_config(
        train={"steps": 100}, schedule={"kind": "linear", "decay_steps": 200}, optimizer={"lr": 1.0}
    )
    assert learning_rate(long, 100) == pytest.approx(0.5)
    short = configs.tiny_config(
        train={"steps": 100}, schedule={"kind": "linear", "decay_steps": 50, "min_lr": 0.2}, optimizer={"lr": 1.0}
    )
    assert learning_rate(short, 80) == pytest.approx(0.2)

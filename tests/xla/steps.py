"""Some steps of a Trainer, and how far two such runs are apart."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch_xla.debug.metrics as metrics
from torch import Tensor

from tests.support import configs
from tests.xla.replicas import Replica, together
from trainyard.config.schema import Config
from trainyard.core import counter_rng
from trainyard.devices import Device
from trainyard.devices.cpu import CpuDevice
from trainyard.devices.neuron.xla_device import XlaDevice
from trainyard.train.trainer import Trainer

STEPS = 5
LR = 1e-3


class Steps(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    graphs: list[int]
    """Compiled so far, after each step."""


class Apart(NamedTuple):
    """Largest differences between XLA's run and the eager one, and XLA's graphs."""

    losses: float
    norms: float
    weights: float
    graphs: list[int]
    fallbacks: list[str]
    """Operators that torch_xla has no rule for: each would leave the graph."""


def take(config: Config, device: Device) -> Steps:
    trainer = Trainer(config, device=device)
    for _ in range(2):  # the second waits for what others compile in the first
        device.flush()
    found = Steps([], [], {}, [])
    before = compiled()
    for number in range(1, STEPS + 1):
        for model in trainer.models:
            model.train()
        result = trainer.train_step(trainer.loader.batch(number - 1, trainer.batch_slice), number, LR)
        device.flush()
        found.losses.append(float(result.loss))
        found.norms.append(float(result.grad_norm))
        found.graphs.append(compiled() - before)
    trainer.optimizer.wait_for_weights()
    values = {name: trainer.full_parameter(name) for name in sorted(trainer.blueprint.parameter_names())}
    device.flush()
    found.weights.update({name: value.cpu() for name, value in values.items()})
    return found


def alone(model: dict[str, Any], sections: dict[str, Any]) -> Apart:
    """One XLA device against eager torch."""
    config = configs.tiny_config(model, **sections)
    return compared(take(config, XlaDevice()), take(config, CpuDevice()))


def replicated(ranks: int, model: dict[str, Any], sections: dict[str, Any]) -> list[Apart]:
    """Each of several XLA devices against eager torch on one rank."""

    def job(device: Replica) -> Steps:
        return take(configs.tiny_config(model, **sections), device)

    found = together(ranks, job)
    single = take(configs.tiny_config(model, **{**sections, "layout": {}}), CpuDevice())
    return [compared(found[rank], single) for rank in range(ranks)]


def random_numbers_differ() -> list[str]:
    """Names of what is not the same on XLA as it is eager."""
    words = torch.arange(-50, 50, dtype=torch.int64) * 0x0123456789ABCDEF
    key = torch.tensor([0x12345678, -0x7654321], dtype=torch.int32)
    draws: dict[str, Callable[[torch.device], Tensor]] = {
        "mix64": lambda device: counter_rng.mix64(words.to(device)),
        "mix32": lambda device: counter_rng.mix32(words.int().to(device)),
        "cell32": lambda device: counter_rng.element_bits(
            counter_rng.row_seeds(key.to(device), words.int().to(device), words.int().to(device)),
            key[0].to(device),
            words.int().to(device),
        ),
    }
    handle = XlaDevice().torch_device
    return [name for name, draw in draws.items() if not torch.equal(draw(handle).cpu(), draw(CpuDevice().torch_device))]


def compared(traced: Steps, eager: Steps) -> Apart:
    fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return Apart(
        max(abs(a - b) for a, b in zip(traced.losses, eager.losses, strict=True)),
        max(abs(a - b) for a, b in zip(traced.norms, eager.norms, strict=True)),
        max(float((traced.weights[name] - eager.weights[name]).abs().max()) for name in eager.weights),
        traced.graphs,
        [name for name in fallbacks if name != "aten::_local_scalar_dense"],  # a number that the test itself reads
    )


def compiled() -> int:
    return metrics.counter_value("UncachedCompile") or 0

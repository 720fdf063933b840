"""Train a few steps on XLA and on the CPU, and measure the difference."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch_xla.debug.metrics as metrics
from torch import Tensor

from tests.support import configs
from tests.xla.replicas import Replica, run_replicas
from trainyard.config.schema import Config
from trainyard.core import counter_rng
from trainyard.core.world import World
from trainyard.devices import Device
from trainyard.devices.cpu import CpuDevice
from trainyard.devices.neuron.xla_device import XlaDevice
from trainyard.run.trainer import Trainer

STEPS = 5
LR = 1e-3


class TrainingRun(NamedTuple):
    """Results of a short training."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    graphs: list[int]
    """Number of compiled graphs after each step."""


class RunDifference(NamedTuple):
    """Largest differences between the XLA run and the eager run, and the XLA run's graphs."""

    losses: float
    norms: float
    weights: float
    graphs: list[int]
    fallbacks: list[str]
    """Operators without an XLA lowering, which would break the graph."""


def train(config: Config, device: Device, world: World = World()) -> TrainingRun:  # noqa: B008
    trainer = Trainer(config, device=device, world=world)
    for _ in range(2):  # the second flush waits for what others compile in the first
        device.flush()
    run = TrainingRun([], [], {}, [])
    before = graphs_compiled()
    for step in range(1, STEPS + 1):
        for model in trainer.models:
            model.train()
        result = trainer.train_step(trainer.loader.batch(step - 1, trainer.batch_slice), step, LR)
        device.flush()
        run.losses.append(float(result.loss))
        run.norms.append(float(result.grad_norm))
        run.graphs.append(graphs_compiled() - before)
    trainer.optimizer.wait_for_weights()
    values = {name: trainer.full_parameter(name) for name in sorted(trainer.blueprint.parameter_names())}
    device.flush()
    run.weights.update({name: value.cpu() for name, value in values.items()})
    return run


def compare_one_device(model: dict[str, Any], sections: dict[str, Any]) -> RunDifference:
    """Compare one XLA device with eager torch."""
    config = configs.tiny_config(model, **sections)
    return difference(train(config, XlaDevice()), train(config, CpuDevice()))


def compare_replicas(ranks: int, model: dict[str, Any], sections: dict[str, Any]) -> list[RunDifference]:
    """Compare each of several XLA devices with eager torch on one rank."""

    def job(device: Replica, world: World) -> TrainingRun:
        return train(configs.tiny_config(model, **sections), device, world)

    runs = run_replicas(ranks, job)
    single = train(configs.tiny_config(model, **{**sections, "layout": {}}), CpuDevice())
    return [difference(runs[rank], single) for rank in range(ranks)]


def random_numbers_differ() -> list[str]:
    """Names of random functions whose XLA results differ from eager ones."""
    values = torch.arange(-50, 50, dtype=torch.int64) * 0x0123456789ABCDEF
    key = torch.tensor([0x12345678, -0x7654321], dtype=torch.int32)
    functions: dict[str, Callable[[torch.device], Tensor]] = {
        "mix64": lambda device: counter_rng.mix64(values.to(device)),
        "mix32": lambda device: counter_rng.mix32(values.int().to(device)),
        "element_bits": lambda device: counter_rng.element_bits(
            counter_rng.row_seeds(key.to(device), values.int().to(device), values.int().to(device)),
            key[0].to(device),
            values.int().to(device),
        ),
    }
    handle = XlaDevice().torch_device
    return [
        name for name, draw in functions.items() if not torch.equal(draw(handle).cpu(), draw(CpuDevice().torch_device))
    ]


def difference(traced: TrainingRun, eager: TrainingRun) -> RunDifference:
    fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return RunDifference(
        max(abs(a - b) for a, b in zip(traced.losses, eager.losses, strict=True)),
        max(abs(a - b) for a, b in zip(traced.norms, eager.norms, strict=True)),
        max(float((traced.weights[name] - eager.weights[name]).abs().max()) for name in eager.weights),
        traced.graphs,
        [name for name in fallbacks if name != "aten::_local_scalar_dense"],  # a scalar that the test itself reads
    )


def graphs_compiled() -> int:
    return metrics.counter_value("UncachedCompile") or 0

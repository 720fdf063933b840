"""A dry run: this process becomes any one rank of any number, without the others and with shapes instead of weights.

The Trainer and all its work are real; messages go nowhere. Used to count messages, to audit and to precompile at full
size on a laptop. A process can have one dry run at a time. `trace_steps` records the operators of one.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from trainyard import compat, devices, models
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.config.smoke import SMOKE_VALIDATION_FRACTION
from trainyard.core.world import World
from trainyard.devices.meta import MetaDevice
from trainyard.parallel.mesh import shutdown_distributed
from trainyard.preflight.dryrun.meta_ops import TraceAborted
from trainyard.preflight.dryrun.op_trace import OpRecorder, RankTrace
from trainyard.run.reference import prepare_live_reference
from trainyard.run.trainer import Trainer
from trainyard.train.evaluate import evaluate
from trainyard.train.optim.lr_schedule import learning_rate

SYNTHETIC_DATA: dict[str, object] = {
    "source": "synthetic",
    "paths": [],
    "weights": [],
    "order": "shuffled",
    "split": None,
    "mask_eod_loss": False,
    "packing": False,
    "buckets": [],
    "chat": {},
}


def synthetic_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """A data section without files, whose samples have the fields of those of `data`."""
    return {**data, **SYNTHETIC_DATA, "document_mask": bool(data.get("document_mask") or data.get("packing"))}


@contextmanager
def fake_rank(backend: str, rank: int, world_size: int, local_rank: int = 0) -> Iterator[World]:
    """Make this process rank `rank` of `world_size`, in a fake process group without the other ranks. The environment
    names the rank too, for the user's functions."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    before = {name: os.environ.get(name) for name in names}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}
    if world_size > 1:
        compat.init_fake_process_group(backend, rank, world_size)
    try:
        yield World(rank, world_size, local_rank)
    finally:
        shutdown_distributed()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def dry_run(config: Config, rank: int, world_size: int, device: devices.Device | None = None) -> Iterator[Trainer]:
    """The Trainer of one rank on the meta device or on `device`. It reads neither data nor checkpoints."""
    device = device or MetaDevice()
    blueprint = models.blueprint_of(config.model)

    def values(name: str) -> torch.Tensor:
        return torch.empty(blueprint.spec(name).shape, device=device.torch_device)

    with fake_rank(device.process_group_backend, rank, world_size) as world:
        trainer = Trainer(without_io(config), weights=values, device=device, world=world)
        prepare_live_reference(trainer)
        yield trainer


def without_io(config: Config) -> Config:
    """The same run without files: synthetic data, no text samples, no loggers, no callbacks, nothing saved, nothing
    resumed."""
    sections = config.model_dump(mode="json")
    sections["data"] = synthetic_data(sections["data"])
    if config.evaluate.every and not config.data.validation_fraction:  # other samples, which are files or the user's
        sections["data"]["validation_fraction"] = SMOKE_VALIDATION_FRACTION
    sections["evaluate"]["sets"] = {}
    sections["checkpoint"] |= {
        "resume": "none",
        "init_from": None,
        "weights_only": False,
        "every": 0,
        "every_minutes": 0.0,
    }
    sections["samples"]["every"] = 0
    sections["log"]["loggers"] = []
    sections["train"]["callbacks"] = []
    return parse(sections)


def trace_steps(trainer: Trainer, steps: int, with_evaluation: bool) -> RankTrace:
    """Trace `steps` training steps of a dry run and, if there is validation data, two batches of evaluation."""
    trace = RankTrace(trainer.world.rank, trainer.mesh.coords["pp"])
    recorder = OpRecorder(trace, trainer.mesh, trainer.device.torch_device)
    hooks = list(_forward_hooks(trainer, recorder))
    for model in trainer.models:
        model.train()
    try:
        with recorder, recorder.record_prints():
            for step in range(1, steps + 1):
                batch = trainer.loader.batch(step - 1, trainer.batch_slice)
                with recorder.phase(f"step {step}"):
                    trainer.train_step(batch, step, learning_rate(trainer.config, step))
            if with_evaluation and trainer.validation_loaders:
                batches = trainer.validation_loaders[""].one_epoch(trainer.batch_slice)
                parts = trainer.runner, trainer.loss_fn, trainer.metrics, batches
                with recorder.phase("evaluation"):
                    evaluate(*parts, max_batches=2)
    except TraceAborted as error:
        trace.abort_reason = str(error)
    finally:
        for hook in hooks:
            hook.remove()
    return trace


def _forward_hooks(trainer: Trainer, recorder: OpRecorder) -> Iterator[Any]:
    """Hooks that tell the recorder where each forward pass of a model begins and ends."""
    for index, model in enumerate(trainer.models):
        yield model.register_forward_pre_hook(lambda *_: recorder.begin_forward())
        yield model.register_forward_hook(lambda *_, index=index: recorder.end_forward(index))

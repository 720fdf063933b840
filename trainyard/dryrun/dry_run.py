"""A run rehearsed: this process becomes any one rank of any number, without the others, and with shapes in place of
weights. The Trainer is the real one, and so is all it does; what it sends goes nowhere.

For counting messages, auditing and planning at full size on a laptop. One rehearsal at a time in a process.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainyard import compat, devices, models
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.parallel.mesh import shutdown_distributed
from trainyard.train.trainer import Trainer

SYNTHETIC_DATA: dict[str, object] = {
    "source": "synthetic",
    "paths": [],
    "weights": [],
    "order": "shuffled",
    "split": None,
    "mask_eod_loss": False,
}


@contextmanager
def fake_rank(backend: str, rank: int, world_size: int, local_rank: int = 0) -> Iterator[None]:
    """This process as `rank` of `ranks`, none of the others being there."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    before = {name: os.environ.get(name) for name in names}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}
    if world_size > 1:
        compat.init_fake_process_group(backend, rank, world_size)
    try:
        yield
    finally:
        shutdown_distributed()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def dry_run(config: Config, rank: int, world_size: int, device: devices.Device | None = None) -> Iterator[Trainer]:
    """The Trainer of one rank, on a device of shapes; neither data nor checkpoints are looked for."""
    device = device or devices.MetaDevice()
    blueprint = models.family_of(config.model).blueprint(config.model)

    def values(name: str) -> torch.Tensor:
        return torch.empty(blueprint.spec(name).shape, device=device.torch_device)

    with fake_rank(device.process_group_backend, rank, world_size):
        yield Trainer(without_io(config), weights=values, device=device)


def without_io(config: Config) -> Config:
    """The same run without files: generated samples, nothing saved, nothing gone on from."""
    sections = config.model_dump(mode="json")
    sections["data"] |= SYNTHETIC_DATA
    sections["checkpoint"] |= {
        "resume": "none",
        "init_from": None,
        "weights_only": False,
        "every": 0,
        "every_minutes": 0.0,
    }
    return parse(sections)

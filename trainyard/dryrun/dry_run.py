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
from trainyard.parallel.mesh import leave
from trainyard.train.trainer import Trainer

GENERATED: dict[str, object] = {
    "source": "synthetic",
    "paths": [],
    "weights": [],
    "order": "shuffled",
    "split": None,
    "mask_ends": False,
}


@contextmanager
def pretended(backend: str, rank: int, ranks: int, local_rank: int = 0) -> Iterator[None]:
    """This process as `rank` of `ranks`, none of the others being there."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    before = {name: os.environ.get(name) for name in names}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(local_rank)}
    if ranks > 1:
        compat.fake_world(backend, rank, ranks)
    try:
        yield
    finally:
        leave()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def rehearsal(config: Config, rank: int, ranks: int, device: devices.Device | None = None) -> Iterator[Trainer]:
    """The Trainer of one rank, on a device of shapes; neither data nor checkpoints are looked for."""
    device = device or devices.Nowhere()
    blueprint = models.family(config.model).blueprint(config.model)

    def values(name: str) -> torch.Tensor:
        return torch.empty(blueprint.row(name).shape, device=device.handle)

    with pretended(device.process_group, rank, ranks):
        yield Trainer(alone(config), weights=values, device=device)


def alone(config: Config) -> Config:
    """The same run without files: generated samples, nothing saved, nothing gone on from."""
    sections = config.model_dump(mode="json")
    sections["data"] |= GENERATED
    sections["checkpoint"] |= {"resume": "none", "start": None, "weights_only": False, "every": 0, "minutes": 0.0}
    return parse(sections)

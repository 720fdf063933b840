"""Trainium2 and 3 through TorchNeuron, AWS's native backend (torch-neuronx 2.13 and later; its package registers itself
when torch is imported). What is decided here is decided in neuron_environment.py and trainium.py, which need no chip.

The runtime must sleep until the process group is made: that is what gives each rank its core.
"""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from trainyard.core.errors import UserError
from trainyard.devices.base import Compiling, Copying, Device, Peak
from trainyard.devices.neuron.environment import (
    CORES_VARIABLE,
    START,
    check_precision,
    launch_of,
    lnc_of,
    native_environment,
    settled,
)
from trainyard.devices.neuron.instance import OVERRIDE, Instance, find, version
from trainyard.devices.neuron.topology import CHIPS, group_problem, rank_flops, rank_memory, rank_order

OLDEST = (2, 13)
NEEDS = (
    "needs torch-neuronx 2.13.* or 2.14.* from AWS's own package index (Python 3.12 or later) on a trn2 or trn3; on a "
    "trn1: device.name=xla"
)


def obstacle(here: Instance, package: tuple[int, int] | None) -> str | None:
    """Why there is no such device: by the machine, and by the torch-neuronx that is installed."""
    if here.generation == "trn1":
        return "this is a trn1, which TorchNeuron does not know; nearest: device.name=xla"
    if package is None:
        return NEEDS
    if package < OLDEST:
        return f"torch-neuronx {package[0]}.{package[1]} is the older one for XLA; {NEEDS}"
    if not here.chips:
        return f"no chip here (/dev/neuron0 is missing); {NEEDS}"
    if here.generation is None:
        return f"this machine does not say which chip it has; set {OVERRIDE}=trn2 or trn3"
    return None


def neff_cache() -> Path:
    """Compiled graphs. The package writes whole files and renames them, so hosts may share the directory."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "trainyard" / "neff"


class Neuron(Device):
    name = "neuron"
    process_group = "neuron"
    synchronous = False
    logits_bytes = 1 << 28
    traces_attention = True

    def __init__(self, here: Instance | None = None) -> None:
        self.here = here or find()
        self.generation = self.here.generation or "trn2"
        self.lnc = lnc_of(self.generation, None, os.environ)
        self.options: dict[str, Any] = {"dynamic": False}  # an empty one torch.compile would not hand on

    @classmethod
    def available(cls) -> bool:
        return obstacle(find(), version("torch-neuronx")) is None

    @classmethod
    def missing(cls) -> str:
        return obstacle(find(), version("torch-neuronx")) or super().missing()

    def ranks(self) -> int:
        return self.here.chips * CHIPS[self.generation].cores // self.lnc

    def describe(self) -> str:
        memory = rank_memory(self.generation, self.lnc) / 2**30
        return f"{self.here.name or self.generation}, a core of {memory:.0f} GiB (LNC {self.lnc})"

    def peak(self, dtype: torch.dtype) -> Peak | None:
        kind = "fp32" if dtype == torch.float32 else "bf16"
        return Peak(rank_flops(self.generation, self.lnc, kind), f"{self.generation} data sheet, dense, LNC {self.lnc}")

    memory_kind = "trainium"

    def memory_peak(self) -> int:
        """Of what the device has done so far: it counts as it works."""
        return int(_package().max_memory_allocated())

    def order(self, tp: int, ranks: int) -> list[int] | None:
        order = rank_order(self.generation, self.lnc, tp, ranks)
        return None if order == sorted(order) else order

    def takes(self, ranks: Sequence[int]) -> bool:
        return group_problem(self.generation, self.lnc, "all_reduce", ranks) is None

    @property
    def maker(self) -> torch.device:
        return torch.device("cpu")  # the chip's integers have 32 bits

    def architecture(self) -> str:
        return f"{self.generation}, LNC {self.lnc}"

    def environment(self) -> dict[str, str]:
        return settled(START, os.environ)

    def prepare(
        self, deterministic: bool, local_rank: int = 0, precision: str = "fp32", lnc: int | None = None
    ) -> None:
        check_precision(precision)
        self.lnc = lnc_of(self.generation, lnc, os.environ)
        if local_rank >= self.ranks():
            raise UserError(f"local rank {local_rank}: this machine has {self.ranks()} cores, one for each rank")
        launch = launch_of(os.environ)._replace(local_rank=local_rank)
        wanted = native_environment(self.lnc, launch, str(neff_cache()), os.environ.get(CORES_VARIABLE))
        os.environ |= settled(wanted, os.environ)

    def compiling(self) -> Compiling:
        return Compiling("neuron", self.options, static=True)

    def synchronize(self) -> None:
        _package().synchronize()

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        copied = _package().Event()
        copied.record()

        def wait() -> torch.Tensor:
            copied.synchronize()
            return host

        return wait

    def copy_out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copying:
        package = _package()
        stream = package.Stream()
        stream.wait_stream(package.current_stream())
        with package.stream(stream):
            for tensor, host in pairs:
                host.copy_(tensor, non_blocking=True)
            copied = stream.record_event()
        return Copying(copied.synchronize, lambda: package.current_stream().wait_event(copied))


def _package() -> Any:
    return import_module("torch_neuronx")

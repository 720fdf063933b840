"""Trainium1 through torch_xla, the only way there (torch 2.9, Neuron up to 2.31), and any other PJRT device, such as
PJRT_DEVICE=CPU for tests. Work is traced and compiled at every `mark`; torch.compile has nothing to add.

torch_xla reads its environment when it is imported, so it is imported here when the device is prepared, not before.
"""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from trainyard import compat
from trainyard.core.errors import UserError
from trainyard.devices.base import Copying, Device, Peak
from trainyard.devices.cpu import Cpu
from trainyard.devices.neuron.compile_cache import directory
from trainyard.devices.neuron.environment import (
    CORES_VARIABLE,
    START,
    check_precision,
    launch_of,
    lnc_of,
    settled,
    xla_environment,
)
from trainyard.devices.neuron.instance import Instance, find
from trainyard.devices.neuron.topology import CHIPS, group_problem, rank_flops, rank_memory, rank_order
from trainyard.devices.neuron.xla_collectives import ReplicaGroups

PJRT = "PJRT_DEVICE"
NEEDS = (
    "needs torch 2.9 with torch_xla 2.9, on a trn1 with torch-neuronx 2.9.* from AWS's own package index (Neuron 2.31 "
    "or before)"
)


def obstacle(here: Instance, installed: bool, pjrt: str | None) -> str | None:
    """Why there is no such device: by the machine, by torch_xla, and by what PJRT_DEVICE says."""
    if not installed:
        return NEEDS
    if not pjrt and not (here.generation and here.chips):
        return f"no Trainium here; {PJRT}=CPU, say, chooses another device"
    return None


def _obstacle() -> str | None:
    return obstacle(find(), find_spec("torch_xla") is not None, os.environ.get(PJRT))


class Xla(Device):
    name = "xla"
    process_group = "xla"
    synchronous = False
    logits_bytes = 1 << 28
    traces_attention = True
    precompiles = True

    def __init__(self, here: Instance | None = None) -> None:
        self.here = here or find()
        pjrt = os.environ.get(PJRT)
        self.generation = self.here.generation if pjrt in (None, "NEURON") else None
        """None: not a Trainium."""
        self.lnc = lnc_of(self.generation, None, os.environ) if self.generation else 1

    @classmethod
    def available(cls) -> bool:
        return _obstacle() is None

    @classmethod
    def missing(cls) -> str:
        return _obstacle() or super().missing()

    @property
    def handle(self) -> torch.device:
        device: torch.device = _module().device()
        return device

    def ranks(self) -> int:
        return self.here.chips * CHIPS[self.generation].cores // self.lnc if self.generation else 1

    def describe(self) -> str:
        if not self.generation:
            return f"XLA on {os.environ.get(PJRT)}"
        memory = rank_memory(self.generation, self.lnc) / 2**30
        return f"{self.here.name or self.generation} through XLA, a core of {memory:.0f} GiB"

    def peak(self, dtype: torch.dtype) -> Peak | None:
        if not self.generation:
            return None
        kind = "fp32" if dtype == torch.float32 else "bf16"
        return Peak(rank_flops(self.generation, self.lnc, kind), f"{self.generation} data sheet, dense, LNC {self.lnc}")

    memory_kind = "trainium"

    def memory_peak(self) -> int:
        try:
            info = _module("core.xla_model").get_memory_info(self.handle)
        except RuntimeError:  # not every PJRT client counts
            return Cpu().memory_peak()
        return int(info.get("peak_bytes_used", info["bytes_used"]))

    def order(self, tp: int, ranks: int) -> list[int] | None:
        if not self.generation:
            return None
        order = rank_order(self.generation, self.lnc, tp, ranks)
        return None if order == sorted(order) else order

    def takes(self, ranks: Sequence[int]) -> bool:
        return not self.generation or group_problem(self.generation, self.lnc, "all_reduce", ranks) is None

    def collectives(self, groups: list[list[int]]) -> ReplicaGroups:
        return ReplicaGroups(groups)

    @property
    def maker(self) -> torch.device:
        return torch.device("cpu")  # Trainium's integers have 32 bits; and nothing is compiled for it

    def environment(self) -> dict[str, str]:
        return settled(START, os.environ)

    def prepare(
        self, deterministic: bool, local_rank: int = 0, precision: str = "fp32", lnc: int | None = None
    ) -> None:
        launch = launch_of(os.environ)._replace(local_rank=local_rank)
        if self.generation:
            check_precision(precision)
            self.lnc = lnc_of(self.generation, lnc, os.environ)
            if local_rank >= self.ranks():
                raise UserError(f"local rank {local_rank}: this machine has {self.ranks()} cores, one for each rank")
            visible = os.environ.get(CORES_VARIABLE)
            wanted = xla_environment(self.generation, self.lnc, precision, launch, directory(os.environ), visible)
            os.environ |= settled(wanted, os.environ)
        elif launch.ranks > 1:
            raise UserError(
                f"{PJRT}={os.environ.get(PJRT)}: {launch.ranks} processes would not see each other; nearest: one rank"
            )
        _module("distributed.xla_backend")  # the process group of that name
        # Else numbers that happen to be equal on one rank, its place among others say, become one input of its graph.
        _module()._XLAC._set_xla_enable_device_data_cache(False)
        compat.name_device(self.name)

    def compiling(self) -> None:
        return None

    def mark(self) -> None:
        _module().sync()

    def synchronize(self) -> None:
        self.mark()
        _module("core.xla_model").wait_device_ops()

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return tensor.cpu  # called after the next `mark`: it waits for this tensor alone

    def copy_out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copying:
        """At once: a thread that reads tensors while others are traced would cut the trace in two."""
        self.mark()
        for tensor, host in pairs:
            host.copy_(tensor)
        return Copying(lambda: None, lambda: None)


def _module(name: str = "") -> Any:
    return import_module(f"torch_xla.{name}" if name else "torch_xla")

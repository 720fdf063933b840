"""Trainium1 through torch_xla (torch 2.9, Neuron up to 2.31), and any other PJRT device, such as PJRT_DEVICE=CPU in
tests.

AWS supports Trainium1 only through torch_xla. Work is traced lazily and compiled at every `flush`, so torch.compile has
nothing to add. torch_xla reads its environment at import, so `prepare` imports it, not this module.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from trainyard import compat
from trainyard.core.errors import UserError
from trainyard.core.world import ONE_RANK, World
from trainyard.devices.base import HostCopy
from trainyard.devices.builtin.xla import DEVICE
from trainyard.devices.cpu import CpuDevice
from trainyard.devices.neuron.compile_cache import cache_location
from trainyard.devices.neuron.environment import CORES_VARIABLE, merge_env, xla_environment
from trainyard.devices.neuron.topology import TrainiumInstance, detect_instance
from trainyard.devices.neuron.trainium import TrainiumDevice

PJRT_VARIABLE = "PJRT_DEVICE"
REQUIREMENT = (
    "needs torch 2.9 with torch_xla 2.9, on a trn1 with torch-neuronx 2.9.* from AWS's package index (Neuron 2.31 or "
    "earlier)"
)


def missing_requirement(instance: TrainiumInstance, installed: bool, pjrt: str | None) -> str | None:
    """Why this device is unavailable, given the machine, torch_xla and PJRT_DEVICE; None if it is available."""
    if not installed:
        return REQUIREMENT
    if not pjrt and not (instance.generation and instance.chips):
        return f"no Trainium on this machine; {PJRT_VARIABLE} selects another device, such as CPU"
    return None


@dataclass(frozen=True)
class XlaCollectives:
    """Collectives through torch_xla.

    torch's functional collectives lose their group on the way to torch_xla and would run over all ranks. These call
    torch_xla directly with all groups of a kind at once, so the traced graph is the same on every rank. Layouts are
    never pinned: torch_xla gathers pinned tensors as a sum of padded ones, which puts the rank into the graph.
    """

    groups: list[list[int]]
    """All groups of one kind, of equal size; every rank is in exactly one."""

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        return _module("core.xla_model").all_reduce(op, x, groups=self.groups, pin_layout=False)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return _module("core.xla_model").all_gather(x, 0, groups=self.groups, pin_layout=False)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        size = len(self.groups[0])
        return _module("core.xla_model").reduce_scatter("sum", x, 1.0, 0, size, groups=self.groups, pin_layout=False)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return _module("core.xla_model").all_to_all(x, 0, 0, len(self.groups[0]), groups=self.groups, pin_layout=False)


class XlaDevice(TrainiumDevice):
    kind = DEVICE
    name = "xla"
    process_group_backend = "xla"
    has_precompile_tool = True

    def __init__(self, instance: TrainiumInstance | None = None) -> None:
        instance = instance or detect_instance()
        on_trainium = os.environ.get(PJRT_VARIABLE) in (None, "NEURON")
        super().__init__(instance if on_trainium else instance._replace(generation=None))

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return missing_requirement(detect_instance(), find_spec("torch_xla") is not None, os.environ.get(PJRT_VARIABLE))

    @property
    def torch_device(self) -> torch.device:
        return _module().device()

    def describe(self) -> str:
        if not self.generation:
            return f"XLA on {os.environ.get(PJRT_VARIABLE)}"
        name = self.instance.instance_type or self.generation
        return f"{name} through XLA, a core of {self.memory_gib():.0f} GiB"

    def max_memory_allocated(self) -> int:
        try:
            info = _module("core.xla_model").get_memory_info(self.torch_device)
        except RuntimeError:  # not every PJRT client reports memory
            return CpuDevice().max_memory_allocated()
        return int(info.get("peak_bytes_used", info["bytes_used"]))

    def collectives(self, groups: list[list[int]]) -> XlaCollectives:
        return XlaCollectives(groups)

    def prepare(
        self, deterministic: bool, world: World = ONE_RANK, precision: str = "fp32", lnc: int | None = None
    ) -> None:
        self.check_rank(world, precision, lnc)
        if self.generation:
            cache, cores = cache_location(os.environ), os.environ.get(CORES_VARIABLE)
            environment = xla_environment(self.generation, self.lnc, precision, world, cache, cores)
            os.environ |= merge_env(environment, os.environ)
        _module("distributed.xla_backend")  # registers the process group backend
        # With the cache, scalars that happen to be equal on one rank would share a graph input, and graphs would
        # differ.
        _module()._XLAC._set_xla_enable_device_data_cache(False)
        compat.register_device_module(self.name)

    def join_world(self, world: World) -> None:
        """Tell torch_xla that all devices hold replicas. Without that it omits every all-reduce, and ranks would train
        separate models: joining the process group does it only under torchrun, with init_method="xla://"."""
        xla_model, runtime = _module("core.xla_model"), _module("runtime")
        xla_model.set_replication(self.torch_device, xla_model.get_xla_supported_devices())
        rank, size = runtime.global_ordinal(), runtime.world_size()
        if (rank, size) != (world.rank, world.size):
            raise UserError(
                f"device.name=xla: this process is rank {world.rank} of {world.size}, but torch_xla sees device {rank} "
                f"of {size} ({PJRT_VARIABLE}={os.environ.get(PJRT_VARIABLE)}): collectives would not reach all ranks"
            )

    def compile_options(self) -> None:
        return None

    def flush(self) -> None:
        _module().sync()

    def synchronize(self) -> None:
        self.flush()
        _module("core.xla_model").wait_device_ops()

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return tensor.cpu  # called after the next `flush`; waits for this tensor only

    copies_during_steps = False  # they would split the trace of the step

    def start_host_copies(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> HostCopy:
        """Copy synchronously: reading tensors from a thread during tracing would split the trace."""
        self.flush()
        for tensor, host in pairs:
            host.copy_(tensor)
        return HostCopy(lambda: None, lambda: None)


def _module(name: str = "") -> Any:
    return import_module(f"torch_xla.{name}" if name else "torch_xla")

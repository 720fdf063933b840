"""Trainium1 through torch_xla (torch 2.9, Neuron up to 2.31), and any other PJRT device, such as PJRT_DEVICE=CPU in
tests.

AWS supports Trainium1 only through torch_xla. Work is traced lazily and compiled at every `flush`, so torch.compile has
nothing to add. torch_xla reads its environment at import, so `prepare` imports it, not this module.
"""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from trainyard import compat
from trainyard.core.errors import UserError
from trainyard.devices.base import Device, HostCopy, PeakThroughput
from trainyard.devices.cpu import CpuDevice
from trainyard.devices.neuron.compile_cache import cache_location
from trainyard.devices.neuron.environment import (
    CORES_VARIABLE,
    PROCESS_START_ENV,
    check_precision,
    merge_env,
    read_launch_info,
    resolve_lnc,
    xla_environment,
)
from trainyard.devices.neuron.instance import TrainiumInstance, detect_instance
from trainyard.devices.neuron.topology import CHIPS, group_problem, rank_flops, rank_memory_bytes, rank_order
from trainyard.devices.neuron.xla_collectives import XlaCollectives

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


def _missing_requirement_here() -> str | None:
    return missing_requirement(detect_instance(), find_spec("torch_xla") is not None, os.environ.get(PJRT_VARIABLE))


class XlaDevice(Device):
    name = "xla"
    process_group_backend = "xla"
    synchronous = False
    max_logits_bytes = 1 << 28
    decomposes_attention = True
    has_precompile_tool = True

    def __init__(self, instance: TrainiumInstance | None = None) -> None:
        self.instance = instance or detect_instance()
        pjrt = os.environ.get(PJRT_VARIABLE)
        self.generation = self.instance.generation if pjrt in (None, "NEURON") else None
        """Trainium generation; None on other PJRT devices."""
        self.lnc = resolve_lnc(self.generation, None, os.environ) if self.generation else 1

    @classmethod
    def available(cls) -> bool:
        return _missing_requirement_here() is None

    @classmethod
    def unavailable_reason(cls) -> str:
        return _missing_requirement_here() or super().unavailable_reason()

    @property
    def torch_device(self) -> torch.device:
        device: torch.device = _module().device()
        return device

    def max_local_ranks(self) -> int:
        return self.instance.chips * CHIPS[self.generation].cores // self.lnc if self.generation else 1

    def describe(self) -> str:
        if not self.generation:
            return f"XLA on {os.environ.get(PJRT_VARIABLE)}"
        memory = rank_memory_bytes(self.generation, self.lnc) / 2**30
        return f"{self.instance.instance_type or self.generation} through XLA, a core of {memory:.0f} GiB"

    def peak_throughput(self, dtype: torch.dtype) -> PeakThroughput | None:
        if not self.generation:
            return None
        kind = "fp32" if dtype == torch.float32 else "bf16"
        return PeakThroughput(
            rank_flops(self.generation, self.lnc, kind), f"{self.generation} data sheet, dense, LNC {self.lnc}"
        )

    memory_model = "trainium"

    def max_memory_allocated(self) -> int:
        try:
            info = _module("core.xla_model").get_memory_info(self.torch_device)
        except RuntimeError:  # not every PJRT client reports memory
            return CpuDevice().max_memory_allocated()
        return int(info.get("peak_bytes_used", info["bytes_used"]))

    def rank_order(self, tp: int, world_size: int) -> list[int] | None:
        if not self.generation:
            return None
        order = rank_order(self.generation, self.lnc, tp, world_size)
        return None if order == sorted(order) else order

    def supports_group(self, ranks: Sequence[int]) -> bool:
        return not self.generation or group_problem(self.generation, self.lnc, "all_reduce", ranks) is None

    def collectives(self, groups: list[list[int]]) -> XlaCollectives:
        return XlaCollectives(groups)

    @property
    def init_device(self) -> torch.device:
        return torch.device("cpu")  # Trainium has 32-bit integers only, and this avoids compiling

    def rank_environment(self) -> dict[str, str]:
        return merge_env(PROCESS_START_ENV, os.environ)

    def prepare(
        self, deterministic: bool, local_rank: int = 0, precision: str = "fp32", lnc: int | None = None
    ) -> None:
        launch = read_launch_info(os.environ)._replace(local_rank=local_rank)
        if self.generation:
            check_precision(precision)
            self.lnc = resolve_lnc(self.generation, lnc, os.environ)
            if local_rank >= self.max_local_ranks():
                raise UserError(
                    f"local rank {local_rank}: this machine has {self.max_local_ranks()} cores, one per rank"
                )
            visible = os.environ.get(CORES_VARIABLE)
            environment = xla_environment(
                self.generation, self.lnc, precision, launch, cache_location(os.environ), visible
            )
            os.environ |= merge_env(environment, os.environ)
        elif launch.world_size > 1:
            raise UserError(
                f"{PJRT_VARIABLE}={os.environ.get(PJRT_VARIABLE)}: {launch.world_size} processes cannot communicate; "
                "nearest: one rank"
            )
        _module("distributed.xla_backend")  # registers the process group backend
        # With the cache, scalars that happen to be equal on one rank would share a graph input, and graphs would
        # differ.
        _module()._XLAC._set_xla_enable_device_data_cache(False)
        compat.register_device_module(self.name)

    def compile_options(self) -> None:
        return None

    def flush(self) -> None:
        _module().sync()

    def synchronize(self) -> None:
        self.flush()
        _module("core.xla_model").wait_device_ops()

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return tensor.cpu  # called after the next `flush`; waits for this tensor only

    def start_host_copies(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> HostCopy:
        """Copy synchronously: reading tensors from a thread during tracing would split the trace."""
        self.flush()
        for tensor, host in pairs:
            host.copy_(tensor)
        return HostCopy(lambda: None, lambda: None)


def _module(name: str = "") -> Any:
    return import_module(f"torch_xla.{name}" if name else "torch_xla")

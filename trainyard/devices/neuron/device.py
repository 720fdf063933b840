"""Trainium2 and 3 through TorchNeuron, AWS's native backend.

Needs torch-neuronx 2.13 or later, which registers itself when torch is imported. Decisions are pure functions in
environment.py and topology.py, which need no chip. The runtime must not start before the process group exists: that is
what assigns each rank its core.
"""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from trainyard.core.errors import UserError
from trainyard.devices.base import CompileOptions, Device, HostCopy, PeakThroughput
from trainyard.devices.neuron.environment import (
    CORES_VARIABLE,
    PROCESS_START_ENV,
    check_precision,
    merge_env,
    native_environment,
    read_launch_info,
    resolve_lnc,
)
from trainyard.devices.neuron.instance import PLATFORM_VARIABLE, TrainiumInstance, detect_instance, installed_version
from trainyard.devices.neuron.topology import CHIPS, group_problem, rank_flops, rank_memory_bytes, rank_order

MIN_VERSION = (2, 13)
REQUIREMENT = (
    "needs torch-neuronx 2.13.* or 2.14.* from AWS's package index (Python 3.12 or later) on a trn2 or trn3; on a "
    "trn1: device.name=xla"
)


def missing_requirement(instance: TrainiumInstance, package: tuple[int, int] | None) -> str | None:
    """Why this device is unavailable, given the machine and the installed torch-neuronx version; None if it is."""
    if instance.generation == "trn1":
        return "this is a trn1, which TorchNeuron does not support; nearest: device.name=xla"
    if package is None:
        return REQUIREMENT
    if package < MIN_VERSION:
        return f"torch-neuronx {package[0]}.{package[1]} is the older package for XLA; {REQUIREMENT}"
    if not instance.chips:
        return f"no chip on this machine (/dev/neuron0 is missing); {REQUIREMENT}"
    if instance.generation is None:
        return f"cannot tell which chip this machine has; set {PLATFORM_VARIABLE}=trn2 or trn3"
    return None


def neff_cache_dir() -> Path:
    """Directory of compiled graphs. torch-neuronx writes files atomically, so hosts may share it."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "trainyard" / "neff"


class NeuronDevice(Device):
    name = "neuron"
    process_group_backend = "neuron"
    synchronous = False
    max_logits_bytes = 1 << 28
    decomposes_attention = True

    def __init__(self, instance: TrainiumInstance | None = None) -> None:
        self.instance = instance or detect_instance()
        self.generation = self.instance.generation or "trn2"
        self.lnc = resolve_lnc(self.generation, None, os.environ)
        self.backend_options: dict[str, Any] = {"dynamic": False}  # torch.compile drops an empty dict

    @classmethod
    def available(cls) -> bool:
        return missing_requirement(detect_instance(), installed_version("torch-neuronx")) is None

    @classmethod
    def unavailable_reason(cls) -> str:
        return (
            missing_requirement(detect_instance(), installed_version("torch-neuronx")) or super().unavailable_reason()
        )

    def max_local_ranks(self) -> int:
        return self.instance.chips * CHIPS[self.generation].cores // self.lnc

    def describe(self) -> str:
        memory = rank_memory_bytes(self.generation, self.lnc) / 2**30
        return f"{self.instance.instance_type or self.generation}, a core of {memory:.0f} GiB (LNC {self.lnc})"

    def peak_throughput(self, dtype: torch.dtype) -> PeakThroughput | None:
        kind = "fp32" if dtype == torch.float32 else "bf16"
        return PeakThroughput(
            rank_flops(self.generation, self.lnc, kind), f"{self.generation} data sheet, dense, LNC {self.lnc}"
        )

    memory_model = "trainium"

    def max_memory_allocated(self) -> int:
        return int(_package().max_memory_allocated())

    def rank_order(self, tp: int, world_size: int) -> list[int] | None:
        order = rank_order(self.generation, self.lnc, tp, world_size)
        return None if order == sorted(order) else order

    def supports_group(self, ranks: Sequence[int]) -> bool:
        return group_problem(self.generation, self.lnc, "all_reduce", ranks) is None

    @property
    def init_device(self) -> torch.device:
        return torch.device("cpu")  # the chip has 32-bit integers only

    def architecture(self) -> str:
        return f"{self.generation}, LNC {self.lnc}"

    def rank_environment(self) -> dict[str, str]:
        return merge_env(PROCESS_START_ENV, os.environ)

    def prepare(
        self, deterministic: bool, local_rank: int = 0, precision: str = "fp32", lnc: int | None = None
    ) -> None:
        check_precision(precision)
        self.lnc = resolve_lnc(self.generation, lnc, os.environ)
        if local_rank >= self.max_local_ranks():
            raise UserError(f"local rank {local_rank}: this machine has {self.max_local_ranks()} cores, one per rank")
        launch = read_launch_info(os.environ)._replace(local_rank=local_rank)
        environment = native_environment(self.lnc, launch, str(neff_cache_dir()), os.environ.get(CORES_VARIABLE))
        os.environ |= merge_env(environment, os.environ)

    def compile_options(self) -> CompileOptions:
        return CompileOptions("neuron", self.backend_options, static_shapes=True)

    def synchronize(self) -> None:
        _package().synchronize()

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        copied = _package().Event()
        copied.record()

        def wait() -> torch.Tensor:
            copied.synchronize()
            return host

        return wait

    def start_host_copies(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> HostCopy:
        package = _package()
        stream = package.Stream()
        stream.wait_stream(package.current_stream())
        with package.stream(stream):
            for tensor, host in pairs:
                host.copy_(tensor, non_blocking=True)
            copied = stream.record_event()
        return HostCopy(copied.synchronize, lambda: package.current_stream().wait_event(copied))


def _package() -> Any:
    return import_module("torch_neuronx")

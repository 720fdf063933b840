"""Trainium2 and 3 through TorchNeuron, AWS's native backend.

Needs torch-neuronx 2.13 or later, which registers itself when torch is imported. Decisions are pure functions in
environment.py and topology.py, which need no chip. The runtime must not start before the process group exists: that is
what assigns each rank its core.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from trainyard.core.user_cache import user_cache
from trainyard.core.world import ONE_RANK, World
from trainyard.devices.base import CompileOptions, StreamDevice
from trainyard.devices.neuron.environment import CORES_VARIABLE, merge_env, native_environment
from trainyard.devices.neuron.topology import PLATFORM_VARIABLE, TrainiumInstance, detect_instance, installed_version
from trainyard.devices.neuron.trainium import TrainiumDevice

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
    return user_cache("neff")


class NeuronDevice(TrainiumDevice, StreamDevice):
    name = "neuron"
    process_group_backend = "neuron"

    def __init__(self, instance: TrainiumInstance | None = None) -> None:
        instance = instance or detect_instance()
        super().__init__(instance._replace(generation=instance.generation or "trn2"))
        self.backend_options: dict[str, Any] = {"dynamic": False}  # torch.compile drops an empty dict

    @property
    def package(self) -> Any:
        return import_module("torch_neuronx")

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return missing_requirement(detect_instance(), installed_version("torch-neuronx"))

    def describe(self) -> str:
        name = self.instance.instance_type or self.generation
        return f"{name}, a core of {self.memory_gib():.0f} GiB (LNC {self.lnc})"

    def architecture(self) -> str:
        return f"{self.generation}, LNC {self.lnc}"

    def prepare(
        self, deterministic: bool, world: World = ONE_RANK, precision: str = "fp32", lnc: int | None = None
    ) -> None:
        self.check_rank(world, precision, lnc)
        environment = native_environment(self.lnc, world, str(neff_cache_dir()), os.environ.get(CORES_VARIABLE))
        os.environ |= merge_env(environment, os.environ)

    def compile_options(self) -> CompileOptions:
        return CompileOptions("neuron", self.backend_options, static_shapes=True)

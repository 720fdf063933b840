"""Devices without memory, for dry runs of models that this machine could not hold.

`select` never returns one; a Trainer receives it explicitly. `MetaDevice` is torch's meta device. `as_fake` adapts any
other device to fake tensors, which claim to be on it but have no memory, so that its compiler can trace a step.
"""

from collections.abc import Callable
from typing import Any

import torch

from trainyard.devices.base import CompileOptions, Device, PeakThroughput
from trainyard.devices.cpu import CpuDevice
from trainyard.devices.stopwatch import Stopwatch


class _NoClock(Device):
    """A mixin for devices that compute nothing, so that no time of theirs means anything."""

    def peak_throughput(self, dtype: torch.dtype) -> PeakThroughput | None:
        return None

    def stopwatch(self) -> Stopwatch | None:
        return None


class MetaDevice(_NoClock, CpuDevice):
    name = "meta"
    process_group_backend = "cpu:fake,meta:fake"

    def describe(self) -> str:
        return "no device, shapes only"


class _FakeDevice(_NoClock):
    """A mixin that comes before the real device in the MRO and overrides what fake tensors cannot do."""

    compile_backend: Callable[..., Any]

    def pin_memory(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.torch_device)

    def compile_options(self) -> CompileOptions | None:
        options = super().compile_options()
        return options and options._replace(backend=self.compile_backend)

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: tensor


def as_fake(device: Device, compile_backend: Callable[..., Any]) -> Device:
    """The same device, with the same properties, for one rank of a fake world on fake tensors. `compile_backend` is the
    torch.compile backend that traces its graphs."""
    backends = ",".join(f"{name}:fake" for name in sorted({device.name, CpuDevice.name}))
    attributes = {
        "process_group_backend": backends,
        "carries_objects": True,
        "compile_backend": staticmethod(compile_backend),
    }
    return type("FakeDevice", (_FakeDevice, type(device)), attributes)()

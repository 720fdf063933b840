"""Devices of shapes: tensors without memory, to rehearse a run that this machine could not hold.

Never chosen by `select`: a Trainer is handed one. `Nowhere` is torch's meta device; `traced` gives any other device for
work on tensors that say they are there and have no memory either, so that its own compiler can be asked.
"""

from collections.abc import Callable

import torch

from trainyard.devices.base import Device, PeakThroughput
from trainyard.devices.cpu import CpuDevice
from trainyard.kernels.reference import Kernels


class MetaDevice(CpuDevice):
    name = "meta"
    process_group_backend = "cpu:fake,meta:fake"

    def describe(self) -> str:
        return "no device, shapes alone"

    def peak_throughput(self, dtype: torch.dtype) -> PeakThroughput | None:
        return None


class _FakeDevice(Device):
    """Before a device in the order of bases: what cannot be done, or is not worth it, without memory."""

    def peak_throughput(self, dtype: torch.dtype) -> PeakThroughput | None:
        return None

    def pin_memory(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.torch_device)

    def kernels(self, fused: bool = True) -> Kernels:
        """Kernels that work in place are no operators, so no rule says what they make of shapes: these do nothing."""
        made = super().kernels(fused)
        if made.cross_entropy_:
            made.cross_entropy_ = lambda logits, labels, ignored: logits.new_empty(len(logits), dtype=torch.float32)
        if made.adamw_:
            made.adamw_ = made.adamw_stochastic_rounding_ = lambda *given: None
        return made

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: tensor


def as_fake(device: Device) -> Device:
    """The same device, its answers included, in a process that is one of many and has none of their memory."""
    backends = ",".join(f"{name}:fake" for name in sorted({device.name, CpuDevice.name}))
    made: Device = type("Traced", (_FakeDevice, type(device)), {"process_group": backends})()
    return made

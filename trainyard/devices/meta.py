"""Devices of shapes: tensors without memory, to rehearse a run that this machine could not hold.

Never chosen by `select`: a Trainer is handed one. `Nowhere` is torch's meta device; `traced` gives any other device for
work on tensors that say they are there and have no memory either, so that its own compiler can be asked.
"""

from collections.abc import Callable

import torch

from trainyard.devices.base import Device, Peak
from trainyard.devices.cpu import Cpu
from trainyard.kernels.reference import Kernels


class Nowhere(Cpu):
    name = "meta"
    process_group = "cpu:fake,meta:fake"

    def describe(self) -> str:
        return "no device, shapes alone"

    def peak(self, dtype: torch.dtype) -> Peak | None:
        return None


class _Traced(Device):
    """Before a device in the order of bases: what cannot be done, or is not worth it, without memory."""

    def peak(self, dtype: torch.dtype) -> Peak | None:
        return None

    def pin(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.handle)

    def kernels(self, own: bool = True) -> Kernels:
        """Kernels that work in place are no operators, so no rule says what they make of shapes: these do nothing."""
        made = super().kernels(own)
        if made.cross_entropy_:
            made.cross_entropy_ = lambda logits, labels, ignored: logits.new_empty(len(logits), dtype=torch.float32)
        if made.adamw_:
            made.adamw_ = made.adamw_rounded_ = lambda *given: None
        return made

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: tensor


def traced(device: Device) -> Device:
    """The same device, its answers included, in a process that is one of many and has none of their memory."""
    backends = ",".join(f"{name}:fake" for name in sorted({device.name, Cpu.name}))
    made: Device = type("Traced", (_Traced, type(device)), {"process_group": backends})()
    return made

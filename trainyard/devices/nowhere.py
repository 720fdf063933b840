"""A device of shapes: tensors without memory (torch's meta device), to rehearse a run that this machine could not hold.

Never chosen by `select`: a Trainer is handed it.
"""

import torch

from trainyard.devices.base import Peak
from trainyard.devices.cpu import Cpu


class Nowhere(Cpu):
    name = "meta"
    process_group = "cpu:fake,meta:fake"

    def describe(self) -> str:
        return "no device, shapes alone"

    def peak(self, dtype: torch.dtype) -> Peak | None:
        return None

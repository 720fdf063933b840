"""Live bytes of a device, counted by storage from the first use of a tensor until its memory is freed."""

import weakref
from typing import Any

import torch
from torch import Tensor


class LiveBytes:
    """Current and peak bytes of all storages that were tracked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Each live storage and its size, by id."""
        self.last_used: dict[int, int] = {}
        """Index of the last operator that used a storage in this phase, by id."""
        self.current = self.peak = 0
        self.peak_location: object = ""

    def begin_phase(self) -> None:
        """Forget uses, and start a new peak from the current bytes."""
        self.last_used.clear()
        self.peak = self.current

    def track(self, tensor: Tensor, location: object) -> int:
        """Count the memory of a tensor as long as it lives. Returns the id of its storage."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.storages and tensor.device.type == self.device.type:
            size = storage.nbytes()

            def on_free(_: Any) -> None:
                self.current -= self.storages.pop(key)[1]
                self.last_used.pop(key, None)

            self.storages[key] = weakref.ref(storage, on_free), size
            self.current += size
            if self.current > self.peak:
                self.peak, self.peak_location = self.current, location
        return key

    def age(self, tensor: Tensor, op_index: int, location: object) -> int:
        """Operators since the storage was last used, -1 if not yet in this phase. Operator `op_index` uses it now."""
        key = self.track(tensor, location)
        last = self.last_used.get(key)
        self.last_used[key] = op_index
        return -1 if last is None else op_index - last

"""Bytes that are alive, storage by storage: counted when a tensor is first met, and again when its memory goes."""

import weakref
from typing import Any

import torch
from torch import Tensor


class LiveBytes:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Its size in bytes, by id."""
        self.last_used: dict[int, int] = {}
        """When it was last used, by id."""
        self.current = self.peak = 0
        self.peak_location: object = ""

    def begin_phase(self) -> None:
        """A phase begins: nothing has been used in it, and the peak is what is there."""
        self.last_used.clear()
        self.peak = self.current

    def track(self, tensor: Tensor, location: object) -> int:
        """Count a tensor's memory for as long as it lives. Gives its id."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.storages and tensor.device.type == self.device.type:
            size = storage.nbytes()

            def gone(_: Any) -> None:
                self.current -= self.storages.pop(key)[1]
                self.last_used.pop(key, None)

            self.storages[key] = weakref.ref(storage, gone), size
            self.current += size
            if self.current > self.peak:
                self.peak, self.peak_location = self.current, location
        return key

    def age(self, tensor: Tensor, op_index: int, location: object) -> int:
        """How long ago this memory was used, seen from `moment`; -1: not in this phase. It is used now."""
        key = self.track(tensor, location)
        before = self.last_used.get(key)
        self.last_used[key] = op_index
        return -1 if before is None else op_index - before

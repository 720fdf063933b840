"""Bytes that are alive, storage by storage: counted when a tensor is first met, and again when its memory goes."""

import weakref
from typing import Any

import torch
from torch import Tensor


class Alive:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Its size in bytes, by id."""
        self.used: dict[int, int] = {}
        """When it was last used, by id."""
        self.now = self.peak = 0
        self.peak_at: object = ""

    def restart(self) -> None:
        """A phase begins: nothing has been used in it, and the peak is what is there."""
        self.used.clear()
        self.peak = self.now

    def touch(self, tensor: Tensor, place: object) -> int:
        """Count a tensor's memory for as long as it lives. Gives its id."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.memory and tensor.device.type == self.device.type:
            size = storage.nbytes()

            def gone(_: Any) -> None:
                self.now -= self.memory.pop(key)[1]
                self.used.pop(key, None)

            self.memory[key] = weakref.ref(storage, gone), size
            self.now += size
            if self.now > self.peak:
                self.peak, self.peak_at = self.now, place
        return key

    def age(self, tensor: Tensor, moment: int, place: object) -> int:
        """How long ago this memory was used, seen from `moment`; -1: not in this phase. It is used now."""
        key = self.touch(tensor, place)
        before = self.used.get(key)
        self.used[key] = moment
        return -1 if before is None else moment - before

"""States of the random generators that user code may draw from, saved with a checkpoint. Trainyard itself uses none of
them: its random numbers are functions of seed, name, step and index (core/counter_rng.py)."""

import json
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainyard.devices import Device

SavedRngState = tuple[dict[str, Tensor], dict[str, str]]
"""Generator states of one rank as a checkpoint holds them: as tensors, and as texts."""
RNG_TEXT_KEY = "RANDOM"


class RngState(NamedTuple):
    """Generator states of one rank. Taken after every step, in microseconds; encoded only for a checkpoint."""

    host: Tensor
    device: Tensor | None
    python: tuple[Any, ...]
    numpy: Any

    def encode(self, rank: int) -> SavedRngState:
        states = {"host": self.host, "device": self.device}
        tensors = {f"random.{name}.{rank}": state for name, state in states.items() if state is not None}
        kind, keys, *rest = self.numpy
        texts = {"python": self.python, "numpy": [kind, np.asarray(keys).tolist(), *rest]}
        return tensors, {RNG_TEXT_KEY: json.dumps(texts)}


def capture_rng_state(device: Device) -> RngState:
    return RngState(torch.get_rng_state(), device.get_rng_state(), random.getstate(), np.random.get_state())


def restore_rng_state(saved: SavedRngState | None, device: Device, rank: int) -> None:
    """Restore the states of the rank with the same number. Does nothing if the saved run had no such rank."""
    if not saved:
        return
    tensors, texts = saved
    if (host_state := tensors.get(f"random.host.{rank}")) is not None:
        torch.set_rng_state(host_state)
    if (device_state := tensors.get(f"random.device.{rank}")) is not None:
        device.set_rng_state(device_state)
    if RNG_TEXT_KEY in texts:
        states = json.loads(texts[RNG_TEXT_KEY])
        kind, internal_state, gauss = states["python"]
        random.setstate((kind, tuple(internal_state), gauss))
        np.random.set_state(tuple(states["numpy"]))

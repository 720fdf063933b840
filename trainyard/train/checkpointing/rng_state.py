"""States of the random generators that user code may draw from, saved with a checkpoint. Trainyard itself uses none of
them: its random numbers are functions of seed, name, step and index (core/counter_rng.py)."""

import json
import random

import numpy as np
import torch
from torch import Tensor

from trainyard.devices import Device

RngState = tuple[dict[str, Tensor], dict[str, str]]
"""Generator states of one rank: as tensors, and as texts."""
RNG_TEXT_KEY = "RANDOM"


def capture_rng_state(device: Device, rank: int) -> RngState:
    states = {"host": torch.get_rng_state(), "device": device.get_rng_state()}
    tensors = {f"random.{name}.{rank}": state for name, state in states.items() if state is not None}
    kind, keys, *rest = np.random.get_state()
    texts = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}
    return tensors, {RNG_TEXT_KEY: json.dumps(texts)}


def restore_rng_state(saved: RngState | None, device: Device, rank: int) -> None:
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

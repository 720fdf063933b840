"""Random generators that a user's own code may draw from, kept with a checkpoint. The run itself needs none: its random
numbers are functions of seed, name, step and index (see random.py)."""

import json
import random

import numpy as np
import torch
from torch import Tensor

from trainyard.devices import Device

RngState = tuple[dict[str, Tensor], dict[str, str]]
"""Tensors and texts of one rank."""
RNG_TEXT_KEY = "RANDOM"


def capture_rng_state(device: Device, rank: int) -> RngState:
    states = {"host": torch.get_rng_state(), "device": device.get_rng_state()}
    tensors = {f"random.{name}.{rank}": state for name, state in states.items() if state is not None}
    kind, keys, *rest = np.random.get_state()
    texts = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}
    return tensors, {RNG_TEXT_KEY: json.dumps(texts)}


def restore_rng_state(saved: RngState | None, device: Device, rank: int) -> None:
    """What a rank of this number had; nothing where the run had none."""
    if not saved:
        return
    tensors, texts = saved
    if (host := tensors.get(f"random.host.{rank}")) is not None:
        torch.set_rng_state(host)
    if (there := tensors.get(f"random.device.{rank}")) is not None:
        device.set_rng_state(there)
    if RNG_TEXT_KEY in texts:
        states = json.loads(texts[RNG_TEXT_KEY])
        kind, numbers, gauss = states["python"]
        random.setstate((kind, tuple(numbers), gauss))
        np.random.set_state(tuple(states["numpy"]))

"""Random generators that a user's own code may draw from, kept with a checkpoint. The run itself needs none: its random
numbers are functions of seed, name, step and index (see random.py)."""

import json
import random

import numpy as np
import torch
from torch import Tensor

from trainyard.devices import Device

Kept = tuple[dict[str, Tensor], dict[str, str]]
"""Tensors and texts of one rank."""
TEXT = "RANDOM"


def state(device: Device, rank: int) -> Kept:
    states = {"host": torch.get_rng_state(), "device": device.random_state()}
    tensors = {f"random.{name}.{rank}": state for name, state in states.items() if state is not None}
    kind, keys, *rest = np.random.get_state()
    texts = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}
    return tensors, {TEXT: json.dumps(texts)}


def restore(kept: Kept | None, device: Device, rank: int) -> None:
    """What a rank of this number had; nothing where the run had none."""
    if not kept:
        return
    tensors, texts = kept
    if (host := tensors.get(f"random.host.{rank}")) is not None:
        torch.set_rng_state(host)
    if (there := tensors.get(f"random.device.{rank}")) is not None:
        device.set_random_state(there)
    if TEXT in texts:
        states = json.loads(texts[TEXT])
        kind, numbers, gauss = states["python"]
        random.setstate((kind, tuple(numbers), gauss))
        np.random.set_state(tuple(states["numpy"]))

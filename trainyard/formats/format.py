"""What the rest of Trainyard must know about a checkpoint format: how to recognize it, open it and perhaps write it.

Each format is one CheckpointFormat in a file of its own; `formats/registry.py` lists them. `trainyard convert`,
`inspect` and `eval` follow from the list.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from trainyard.checkpoint.weights import TrainingState, WeightSource
from trainyard.formats.tensor_map import StoredTensor
from trainyard.models import ModelConfig

ProgressCallback = Callable[[int], None]
"""Called with the bytes of each tensor that was written."""
LayoutHints = Mapping[str, Any]
"""What the user knows and the files may not show: keys of NxdLayout, or the `base` of an adapter."""
LayoutKeys = Mapping[str, type | tuple[str, ...]]
"""Keys of `--layout` and what they take: int (1 or more), bool, tuple (layer numbers), or one of some words."""


class OpenedWeights(WeightSource, Protocol):
    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions made to read them, for the user."""
        ...


@dataclass(frozen=True)
class WriteOptions:
    """What a conversion asks of the writer of a format."""

    layout: Mapping[str, Any]
    """Checked values of the format's layout keys."""
    dtype: torch.dtype | None
    """None keeps the dtypes of the source."""
    xser: bool
    model_files: Mapping[str, bytes]
    """Contents of the tokenizer's files by name."""
    write_extra_files: Callable[[Path], None]
    """Adds config.json and `model_files` to a directory, for formats that have no place of their own for them."""
    progress: ProgressCallback


@dataclass(frozen=True)
class FormatWriter:
    """How to write a format."""

    tensors: Callable[[ModelConfig, Mapping[str, Any]], Iterable[StoredTensor]]
    """Every tensor that is written for a model at a layout. Refuses a model or a layout that the format cannot hold."""
    write: Callable[[Path, WeightSource, WriteOptions], None]
    """Writes a new directory, which appears under its name only when complete."""
    layout_keys: LayoutKeys
    layout_example: str = ""


@dataclass(frozen=True)
class CheckpointFormat:
    name: str
    """The name in reports and, if the format can be written, of `--to`."""
    description: str
    find: Callable[[Path], object]
    """Returns a true value if there is such a checkpoint at a path, judged by file names."""
    open: Callable[[Path, Any, LayoutHints], OpenedWeights]
    """Opens the weights as those of a ModelConfig; None: of the one that the checkpoint describes."""
    stores_model: bool = True
    """False: it does not describe its model, so `open` always gets a ModelConfig."""
    open_state: Callable[[Path, ModelConfig, LayoutHints], Callable[[], TrainingState] | None] = lambda *_: None
    """Returns a function that opens weights and optimizer state together; None if the checkpoint has no such state."""
    writer: FormatWriter | None = None

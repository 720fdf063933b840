"""Writes a checkpoint of our own form from any state, for any layout, without a run: a box at a time."""

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial, reduce
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trainyard import __version__, models
from trainyard.checkpoint.formats.tensor_map import Weights, shapes_of
from trainyard.checkpoint.io.async_io import Lanes, ahead
from trainyard.checkpoint.io.safetensors_file import CODES
from trainyard.checkpoint.io.storage import LocalPlace
from trainyard.checkpoint.native import checkpoint
from trainyard.checkpoint.native.partition import Box, written
from trainyard.checkpoint.native.shard_file import stream_shard
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.parallel.layout import Layout


class State(Protocol):
    """Weights, and perhaps the optimizer's moments, by boxes of parts."""

    @property
    def model(self) -> models.AnyModel: ...

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """By kind: weights, first, second."""
        ...

    def tensor(self, kind: str, box: Box) -> Tensor: ...


class WeightsAlone:
    """Weights as a State without moments. Where parts differ in dtype, all take one that holds the values of each."""

    def __init__(self, weights: Weights, dtype: torch.dtype | None = None) -> None:
        self.weights = weights
        found = [dtype] if dtype else [weights.dtype(part) for part in shapes_of(weights.model)]
        self.dtypes = {"weights": reduce(torch.promote_types, found)}

    @property
    def model(self) -> models.AnyModel:
        return self.weights.model

    def tensor(self, kind: str, box: Box) -> Tensor:
        region = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
        return self.weights.read(box.part, region).to(self.dtypes[kind])


def bytes_of(state: State) -> int:
    """What a checkpoint of it takes, but for headers."""
    weights = models.family(state.model).blueprint(state.model).parameters()
    return weights * sum(dtype.itemsize for dtype in state.dtypes.values())


def write_native(
    directory: Path,
    state: State,
    config: Config,
    ranks: int,
    progress: Mapping[str, Any],
    wrote: Callable[[int], None] = lambda count: None,
) -> None:
    """A whole checkpoint in `directory`, which must be new: the files that `ranks` ranks of config.layout would write.
    `progress` are the step and what goes with it."""
    layout = Layout.of(config, ranks)
    blueprint = models.family(config.model).blueprint(config.model)
    place = LocalPlace(directory)
    if place.names():
        raise UserError(f"{directory}: is there already and not empty; give a directory that is new")
    place.prepare()

    def write(rank: int) -> None:
        boxes = [(kind, box) for kind in state.dtypes for box in written(blueprint, layout, rank)]

        def tensors() -> Iterator[Tensor]:
            for tensor in ahead(partial(state.tensor, kind, box) for kind, box in boxes):
                yield tensor.contiguous()
                wrote(tensor.nbytes)

        specs = [(checkpoint.key_of(kind, box.part), state.dtypes[kind], box.sizes) for kind, box in boxes]
        offsets = {checkpoint.key_of(kind, box.part): box.offsets for kind, box in boxes}
        stream_shard(place, checkpoint.file_name(rank), specs, offsets, tensors())

    with Lanes() as lanes:
        for rank in range(layout.world):
            lanes.put(rank, partial(write, rank))
    body = {
        **progress,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"trainyard": __version__, "torch": version("torch")},
        "kinds": {kind: CODES[dtype] for kind, dtype in state.dtypes.items()},
        "config": config.model_dump(mode="json"),
    }
    checkpoint.seal(place, checkpoint.table_of(blueprint, layout), body)

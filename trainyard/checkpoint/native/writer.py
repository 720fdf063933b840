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
from trainyard.checkpoint.formats.tensor_map import WeightSource, unfused_shapes
from trainyard.checkpoint.io.async_io import OrderedWorkers, prefetch
from trainyard.checkpoint.io.safetensors_file import CODE_BY_DTYPE
from trainyard.checkpoint.io.storage import LocalStorage
from trainyard.checkpoint.native import checkpoint
from trainyard.checkpoint.native.partition import LocalSlice, owned_slices
from trainyard.checkpoint.native.shard_file import stream_shard
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.parallel.layout import Layout


class StateSource(Protocol):
    """Weights, and perhaps the optimizer's moments, by boxes of parts."""

    @property
    def model(self) -> models.AnyModelConfig: ...

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """By kind: weights, first, second."""
        ...

    def read_state(self, kind: str, box: LocalSlice) -> Tensor: ...


class WeightsOnlyState:
    """Weights as a State without moments. Where parts differ in dtype, all take one that holds the values of each."""

    def __init__(self, weights: WeightSource, dtype: torch.dtype | None = None) -> None:
        self.weights = weights
        found = [dtype] if dtype else [weights.dtype(part) for part in unfused_shapes(weights.model)]
        self.dtypes = {"weights": reduce(torch.promote_types, found)}

    @property
    def model(self) -> models.AnyModelConfig:
        return self.weights.model

    def read_state(self, kind: str, box: LocalSlice) -> Tensor:
        region = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
        return self.weights.read(box.tensor_name, region).to(self.dtypes[kind])


def checkpoint_bytes(state: StateSource) -> int:
    """What a checkpoint of it takes, but for headers."""
    weights = models.family_of(state.model).blueprint(state.model).parameter_count()
    return weights * sum(dtype.itemsize for dtype in state.dtypes.values())


def write_checkpoint(
    directory: Path,
    state: StateSource,
    config: Config,
    ranks: int,
    counters: Mapping[str, Any],
    on_written: Callable[[int], None] = lambda count: None,
) -> None:
    """A whole checkpoint in `directory`, which must be new: the files that `ranks` ranks of config.layout would write.
    `progress` are the step and what goes with it."""
    layout = Layout.from_config(config, ranks)
    blueprint = models.family_of(config.model).blueprint(config.model)
    place = LocalStorage(directory)
    if place.listdir():
        raise UserError(f"{directory}: is there already and not empty; give a directory that is new")
    place.mkdir()

    def write(rank: int) -> None:
        boxes = [(kind, box) for kind in state.dtypes for box in owned_slices(blueprint, layout, rank)]

        def tensors() -> Iterator[Tensor]:
            for tensor in prefetch(partial(state.read_state, kind, box) for kind, box in boxes):
                yield tensor.contiguous()
                on_written(tensor.nbytes)

        specs = [(checkpoint.tensor_key(kind, box.tensor_name), state.dtypes[kind], box.sizes) for kind, box in boxes]
        offsets = {checkpoint.tensor_key(kind, box.tensor_name): box.offsets for kind, box in boxes}
        stream_shard(place, checkpoint.shard_name(rank), specs, offsets, tensors())

    with OrderedWorkers() as lanes:
        for rank in range(layout.world_size):
            lanes.submit(rank, partial(write, rank))
    body = {
        **counters,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"trainyard": __version__, "torch": version("torch")},
        "kinds": {kind: CODE_BY_DTYPE[dtype] for kind, dtype in state.dtypes.items()},
        "config": config.model_dump(mode="json"),
    }
    checkpoint.commit(place, checkpoint.build_shard_table(blueprint, layout), body)

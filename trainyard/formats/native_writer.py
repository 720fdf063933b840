"""Writes a native checkpoint from any source, for any layout, without a training run, one slice at a time."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard import models
from trainyard.checkpoint import checkpoint
from trainyard.checkpoint.file_names import shard_name
from trainyard.checkpoint.partition import owned_slices
from trainyard.checkpoint.safetensors_file import TensorSpec
from trainyard.checkpoint.shard_file import stream_shard
from trainyard.checkpoint.weights import TrainingState, WeightSource, unfused_tensors
from trainyard.config.schema import Config
from trainyard.formats.io.async_io import OrderedWorkers, prefetch
from trainyard.parallel.layout import Layout
from trainyard.remote.storage import LocalStorage


def weights_only_state(weights: WeightSource, dtype: torch.dtype | None = None) -> TrainingState:
    """A state without moments. If the tensors have several dtypes, all get one that represents every value."""
    dtypes = [dtype] if dtype else [weights.dtype(name) for name in unfused_tensors(weights.model)]
    return TrainingState(weights.model, {"weights": reduce(torch.promote_types, dtypes)}, {"weights": weights.read})


def checkpoint_bytes(state: TrainingState) -> int:
    """The size of a checkpoint of this state in bytes, without file headers."""
    blueprint = models.blueprint_of(state.model)
    parameters = blueprint.parameter_count() if _has_weights_only(state) else blueprint.trained_count
    return parameters * sum(dtype.itemsize for dtype in state.dtypes.values())


def _has_weights_only(state: TrainingState) -> bool:
    """True if there is no optimizer state, without which all weights are written, trained or not."""
    return len(state.dtypes) == 1


def write_checkpoint(
    directory: Path,
    state: TrainingState,
    config: Config,
    ranks: int,
    counters: Mapping[str, Any],
    model_files: Mapping[str, bytes] | None = None,
    on_written: Callable[[int], None] = lambda count: None,
) -> None:
    """Write the files that `ranks` ranks of config.layout would write, and commit them. `directory` must be empty.

    `counters` are the step, the number of updates and so on, for the commit file; `model_files` those of the tokenizer.
    `on_written` is called with the bytes of each tensor.
    """
    layout = Layout.from_config(config, ranks)
    blueprint = models.blueprint_of(config.model)
    names = [*blueprint.parameter_names()] if _has_weights_only(state) else blueprint.trained_names()
    storage = LocalStorage(directory)
    storage.mkdir()

    def write(rank: int) -> None:
        slices = [(kind, piece) for kind in state.dtypes for piece in owned_slices(blueprint, layout, rank, names)]

        def tensors() -> Iterator[Tensor]:
            for tensor in prefetch(partial(state.read, kind, piece) for kind, piece in slices):
                yield tensor.contiguous()
                on_written(tensor.nbytes)

        specs = [
            (TensorSpec(checkpoint.tensor_key(kind, piece.name), state.dtypes[kind], piece.sizes), piece.offsets)
            for kind, piece in slices
        ]
        stream_shard(storage, shard_name(rank), specs, tensors())

    with OrderedWorkers() as workers:
        for rank in range(layout.world_size):
            workers.submit(rank, partial(write, rank))
    manifest = checkpoint.build_manifest(config.model_dump(mode="json"), state.dtypes, counters)
    checkpoint.commit(storage, checkpoint.build_shard_table(blueprint, layout, names), manifest, model_files)

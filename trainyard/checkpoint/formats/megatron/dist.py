"""Reads the distributed checkpoints (torch_dist) of Megatron Core: DCP files of full tensors, and common.pt.

iter_NNNNNNN/.metadata, __0_0.distcp ...     tensors; those of all layers are stacked in one, or have a number
iter_NNNNNNN/common.pt                       arguments, iteration
iter_NNNNNNN/metadata.json                   name of the format
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from trainyard.checkpoint.formats.dcp.metadata import METADATA_FILE, DcpTensor, read_dcp_tensors
from trainyard.checkpoint.io.torch_file import LazyTensor, open_torch_file
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorIndex

COMMON_FILE = "common.pt"
GRID_ARGS = ("tensor_model_parallel_size", "model_parallel_size", "pipeline_model_parallel_size")
"""Arguments that say how many ranks saved it. The tensors do not depend on them."""
TRAINING_STATE = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine")
STACKED_LAYERS = re.compile(r"(.*\blayers\.)(?!\d)(.+)")
GATE_AND_UP = {".linear_fc1.weight_w": ".dense_h_to_4h.weight", ".linear_fc1.weight_v": ".dense_h_to_4h_2.weight"}
"""Names of gate and up if they were saved separately (singleton_local_shards)."""


class LayerTensor(LazyTensor):
    """One layer of a tensor that stacks the tensors of all layers."""

    def __init__(self, stacked: LazyTensor, layer: int) -> None:
        self._stacked, self._layer, self.shape, self.dtype = stacked, layer, stacked.shape[1:], stacked.dtype

    def read(self, index: TensorIndex | None = None) -> Tensor:
        index = tuple(slice(0, size) for size in self.shape) if index is None else index
        return self._stacked.read((slice(self._layer, self._layer + 1), *index))[0]


def is_distributed(directory: Path) -> bool:
    return (directory / METADATA_FILE).is_file() and (directory / COMMON_FILE).is_file()


def read_distributed(directory: Path) -> dict[str, Any]:
    """The content in the form that a file of a single rank has."""
    common = open_torch_file(directory / COMMON_FILE, allow_stubs=True)
    if not isinstance(common, dict):
        raise UserError(f"{directory / COMMON_FILE}: expected a dict, found a {type(common).__name__}")
    args = common.get("args")
    if isinstance(args, dict):
        args = {key: value for key, value in args.items() if key not in GRID_ARGS}
    tensors = {
        layer_name: layer
        for name, tensor in read_dcp_tensors(directory).items()
        if not TRAINING_STATE.match(name)
        for layer_name, layer in _layers(name, tensor)
    }
    return {"checkpoint_version": 3.0, **common, "args": args, "model": tensors}


def _layers(name: str, tensor: DcpTensor) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors of all layers in a stacked tensor, each with the number of its layer; else the tensor itself."""
    tensor.check_complete()
    for ending, reference_name in GATE_AND_UP.items():
        name = name.replace(ending, reference_name)
    match = STACKED_LAYERS.fullmatch(name)
    if not match:
        yield name, tensor
        return
    for layer in range(tensor.shape[0]):
        yield f"{match[1]}{layer}.{match[2]}", LayerTensor(tensor, layer)

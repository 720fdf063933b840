"""Finds the files of a Megatron checkpoint and reads the tensors and arguments of each.

The root has a directory per iteration, with a directory per rank, and a text file that names the last complete
iteration. nemo-megatron uses other directory names and another dict structure; both are supported. A distributed
checkpoint (torch_dist, the default of Megatron Core) has no ranks: its directory counts as one file.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorIndex
from trainyard.formats.dcp.metadata import METADATA_FILE, read_dcp_tensors
from trainyard.formats.io.lazy_tensor import AssembledTensor, LazyTensor
from trainyard.formats.io.torch_file import open_torch_file

COMMON_FILE = "common.pt"
GRID_ARGS = ("tensor_model_parallel_size", "model_parallel_size", "pipeline_model_parallel_size")
"""Arguments that say how many ranks saved it. The tensors do not depend on them."""
TRAINING_STATE = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine")
STACKED_LAYERS = re.compile(r"(.*\blayers\.)(?!\d)(.+)")
GATE_AND_UP = {".linear_fc1.weight_w": ".dense_h_to_4h.weight", ".linear_fc1.weight_v": ".dense_h_to_4h_2.weight"}
"""Names of gate and up if they were saved separately (singleton_local_shards)."""
LATEST_FILE = "latest_checkpointed_iteration.txt"
CHECKPOINT_FILES = ("model_optim_rng.pt", "model_optim_rng.ckpt")
RANK_DIRECTORY = re.compile(r"(mp|tp)_rank_(\d+)(?:_(?:pp_rank_)?(\d+))?")
CONTAINER_PREFIX = re.compile(r"^((model|module|language_model|embedding|encoder|transformer|decoder)\.)+")
NON_WEIGHT_BUFFERS = re.compile(r"(inv_freq|masked_bias|_extra_state)$")
"""Entries that are not weights."""
NAME_ALIASES = {
    "final_norm.": "final_layernorm.",
    ".attention.": ".self_attention.",
    ".input_norm.": ".input_layernorm.",
    ".post_attention_norm.": ".post_attention_layernorm.",
    ".pre_mlp_layernorm.": ".post_attention_layernorm.",
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".post_attention_layernorm.",
    ".linear_qkv.": ".query_key_value.",
    ".linear_proj.": ".dense.",
    ".linear_fc1.": ".dense_h_to_4h.",
    ".linear_fc2.": ".dense_4h_to_h.",
}
"""Names of other Megatron versions and of Megatron Core, and the AWS reference's name for the same tensor."""


class LayerTensor(LazyTensor):
    """One layer of a tensor that stacks the tensors of all layers."""

    def __init__(self, stacked: LazyTensor, layer: int) -> None:
        self._stacked, self._layer, self.shape, self.dtype = stacked, layer, stacked.shape[1:], stacked.dtype

    def read_slice(self, index: TensorIndex) -> Tensor:
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


def _layers(name: str, tensor: AssembledTensor) -> Iterator[tuple[str, LazyTensor]]:
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


@dataclass(frozen=True)
class MegatronFiles:
    """The files of one iteration, by tensor-parallel rank and pipeline stage."""

    grid: dict[tuple[int, int], Path]
    tp: int
    pp: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MegatronRankFile:
    """The content of the file of one rank."""

    path: Path
    args: Mapping[str, Any]
    """The stored arguments."""
    version: float
    chunks: list[dict[str, LazyTensor]]
    """Tensors of each virtual stage by name."""


def find_megatron(path: str | Path) -> MegatronFiles | None:
    """Find the checkpoint of a root, an iteration, a rank's directory or a file. None: not a Megatron checkpoint."""
    path = Path(path).expanduser()
    if path.is_file():
        if RANK_DIRECTORY.fullmatch(path.parent.name):
            return _find_rank_files(path.parent.parent, path.name)
        return MegatronFiles({(0, 0): path}, 1, 1) if path.name in CHECKPOINT_FILES else None
    if not path.is_dir():
        return None
    if is_distributed(path):
        return MegatronFiles({(0, 0): path}, 1, 1)
    for name in CHECKPOINT_FILES:
        if (path / name).is_file():
            return find_megatron(path / name)
        if files := _find_rank_files(path, name):
            return files
    return _latest_iteration(path)


def _find_rank_files(directory: Path, name: str) -> MegatronFiles | None:
    """The files called `name` of all ranks in the directory of an iteration."""
    grid, pattern = {}, "mp_rank_{:02d}"
    for entry in sorted(directory.iterdir()):
        if (match := RANK_DIRECTORY.fullmatch(entry.name)) and (entry / name).is_file():
            grid[int(match[2]), int(match[3] or 0)] = entry / name
            if match[3]:
                pattern = "tp_rank_{:02d}_pp_rank_{:03d}" if match[1] == "tp" else "mp_rank_{:02d}_{:03d}"
    if not grid:
        return None
    tp, pp = (1 + max(rank[axis] for rank in grid) for axis in (0, 1))
    missing = [pattern.format(*rank) for rank in product(range(tp), range(pp)) if rank not in grid]
    if missing:
        raise UserError(f"{directory}: {name} is missing in {', '.join(missing)} (tp={tp} x pp={pp} ranks)")
    return MegatronFiles(grid, tp, pp)


def _latest_iteration(root: Path) -> MegatronFiles | None:
    """The iteration that the text file names or, if its directory is gone, the latest complete one."""
    text = (root / LATEST_FILE).read_text(errors="replace").strip() if (root / LATEST_FILE).is_file() else None
    iterations = sorted((path for path in root.glob("iter_*") if path.is_dir()), reverse=True)
    if text is None and not iterations:
        return None
    named = root / (f"iter_{int(text):07d}" if text and text.isdecimal() else "release")
    if named.is_dir() and (files := find_megatron(named)):
        return files
    problem = f"{root / LATEST_FILE}: " + ("no such file" if text is None else f"names {text}, which does not exist")
    for directory in iterations:
        try:
            files = find_megatron(directory)
        except UserError as error:
            problem = str(error)
            continue
        if files:
            return replace(files, notes=(f"{problem}; reading {directory.name}",))
    raise UserError(f"{problem}; no iteration is complete")


def open_rank_file(path: Path) -> MegatronRankFile:
    # Stubs, because upstream's arguments contain Megatron classes.
    state = read_distributed(path) if path.is_dir() else open_torch_file(path, allow_stubs=True)
    if not isinstance(state, dict):
        raise UserError(f"{path}: not a Megatron checkpoint: expected a dict, found a {type(state).__name__}")
    virtual_stages = sorted((key for key in state if re.fullmatch(r"model\d+", str(key))), key=lambda key: int(key[5:]))
    keys = [key for key in ("model", "state_dict") if key in state][:1] or virtual_stages
    if not keys:
        found = ", ".join(map(str, state)) or "nothing"
        raise UserError(f"{path}: not a Megatron checkpoint: has no model, only {found}")
    # nemo-megatron writes state_dict and no version; its order is that of 2.0.
    version = state.get("checkpoint_version", 2.0 if keys == ["state_dict"] else 0)
    if version not in (0, 2.0, 3.0):
        reason = ": it interleaves query, key and value row by row" if version == 1.0 else ""
        raise UserError(
            f"{path}: checkpoint_version={version}{reason}; supported: 0, 2.0 and 3.0; load and save it in Megatron"
        )
    args = state["args"] if isinstance(state.get("args"), dict) else state
    return MegatronRankFile(path, args, float(version), [dict(_flatten_tensors(state[key])) for key in keys])


def _flatten_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, LazyTensor]]:
    """Tensors of nested dicts by dotted name, in the AWS reference's spelling."""
    if isinstance(tree, LazyTensor):
        name = CONTAINER_PREFIX.sub("", prefix[:-1])
        for alias, reference_name in NAME_ALIASES.items():
            name = name.replace(alias, reference_name)
        if not NON_WEIGHT_BUFFERS.search(name):
            yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flatten_tensors(value, f"{prefix}{key}.")

"""Reads optimum-neuron's adapters: PEFT's configuration with the tensors in NxD files of each rank.

    OUT/adapter_default/adapter_config.json
    OUT/adapter_default/adapter_shards/mp_metadata_pp_rank_0.json
    OUT/adapter_default/adapter_shards/model/dp_rank_00_tp_rank_00_pp_rank_00.pt ...

The metadata say how each tensor was sharded and what was fused, as those of optimum-neuron's models do
(formats/optimum.py). A fused layer has one A, which is that of each of its modules: the result is exact. The way back
is not, so nothing writes this format.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard.core.errors import UserError, one_line
from trainyard.core.quantities import counted
from trainyard.formats.io.lazy_tensor import InlineTensor, LazyTensor
from trainyard.formats.nxd.rank_files import find_nxd, read_rank_files
from trainyard.formats.optimum import read_metadata
from trainyard.formats.tensor_map import different_copies

SHARDS_FOLDER = "adapter_shards"
ADAPTER_FOLDER = "adapter_default"
ADAPTER_NAME = re.compile(r"(?<=\.lora_[AB])\.\w+(?=\.\w+$)")
"""The name of an adapter, which its files leave out and its metadata do not."""
LORA_TENSOR = re.compile(r".*\.lora_(A|B)\.weight(_q|_k|_v|_qkv)?")

Shards = dict[str, list[Tensor]]
"""The tensors of each tensor-parallel rank by name."""


def read_shards(directory: Path) -> dict[str, LazyTensor]:
    """The tensors of an adapter by PEFT's names. `directory` is that of its adapter_config.json."""
    root = directory / SHARDS_FOLDER
    files = find_nxd(root)
    if files is None:
        raise UserError(f"{root}: no shards of an adapter; expected model/dp_rank_00_tp_rank_00_pp_rank_00.pt")
    tensors: dict[str, LazyTensor] = {}
    by_rank = read_rank_files(files)
    for stage in sorted({rank.pp for rank in by_rank}):
        shards: Shards = {}
        for rank, stored in by_rank.items():
            for name, tensor in stored.items() if rank.pp == stage else ():
                shards.setdefault(name, []).append(tensor.read())
        if other := next((name for name in shards if not LORA_TENSOR.fullmatch(name)), None):
            raise UserError(f"{root}: {other} is no LoRA matrix of a linear layer; nearest: optimum-cli consolidate")
        path = root / f"mp_metadata_pp_rank_{stage}.json"
        try:
            joined = dict(_join_stage(read_metadata(path), shards, str(path)))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"{path}: does not fit its shards: {type(error).__name__} {one_line(error)}") from None
        tensors |= {name: InlineTensor(tensor.contiguous()) for name, tensor in joined.items()}
    return tensors


def _join_stage(metadata: Mapping[str, Any], shards: Shards, where: str) -> Iterator[tuple[str, Tensor]]:
    """The full tensors of a pipeline rank. Takes from `shards` what was fused, and then the rest."""
    sharded = {ADAPTER_NAME.sub("", name): each for name, each in metadata["parameters"].items()}
    for module in metadata["model_weight_transformation_specs"]:
        for kind, spec in module["specs"]:
            name = module["module_fully_qualified_name"]
            if spec["bias"] or kind not in FUSIONS:
                raise UserError(f"{where}: {kind} of {name}: {'has biases' if spec['bias'] else 'unknown'}")
            yield from FUSIONS[kind](f"{name}.", spec, shards, where)
    for name, parts in shards.items():
        fact = sharded[name]
        if not fact["tensor_model_parallel"]:
            yield name, _same(name, parts, where)
        elif fact.get("partition_stride", 1) != 1:
            raise UserError(f"{where}: {name}: partition_stride={fact['partition_stride']}; supported: 1")
        else:
            yield name, torch.cat(parts, fact["partition_dim"])


def _linears(prefix: str, spec: Mapping[str, Any], shards: Shards, where: str) -> Iterator[tuple[str, Tensor]]:
    """Linear layers that share their input, such as gate and up."""
    fused = f"{prefix}{spec['fused_linear_name']}"
    if f"{fused}.lora_A.weight" not in shards:
        return
    if spec["fuse_axis"] not in (0, "column"):
        raise UserError(f"{where}: fuse_axis={spec['fuse_axis']} of {fused}; supported: 0")
    sizes = [size // spec["tp_size"] for size in spec["original_dims"]]
    ranks = [torch.split(part, sizes) for part in _take(shards, f"{fused}.lora_B.weight", spec)]
    yield from _modules(
        prefix, fused, spec["linear_names"], [torch.cat(rows) for rows in zip(*ranks, strict=True)], shards, where
    )


def _attention(prefix: str, spec: Mapping[str, Any], shards: Shards, where: str) -> Iterator[tuple[str, Tensor]]:
    """Query, key and value, whose heads NxD replicates and reorders, and the columns of the output projection."""
    replicas, kv_heads = spec["kv_size_multiplier"], spec["num_key_value_heads"]

    def in_order(rows: Tensor) -> Tensor:
        """Rows of the query heads: each replica of the key and value heads has its part of every group."""
        return rows.reshape(replicas, kv_heads, -1, rows.shape[1]).transpose(0, 1).flatten(0, 2)

    output = f"{prefix}{spec['output_projection_name']}.lora_A.weight"
    if output in shards:
        yield output, in_order(torch.cat(_take(shards, output, spec), 1).T).T
    fused = f"{prefix}{spec['gqa_qkv_projection_name']}"
    if f"{fused}.lora_A.weight" not in shards:
        return
    if spec["fuse_qkv"]:
        kv = spec["kv_output_size_per_partition"]
        parts = [
            torch.split(each, [spec["q_output_size_per_partition"], kv, kv])
            for each in _take(shards, f"{fused}.lora_B.weight_qkv", spec)
        ]
        q, k, v = (torch.cat(rows) for rows in zip(*parts, strict=True))
    else:
        q, k, v = (torch.cat(_take(shards, f"{fused}.lora_B.weight_{letter}", spec)) for letter in "qkv")
    names = [spec[f"{part}_projection_name"] for part in ("query", "key", "value")]
    k, v = (_same(f"{fused}.lora_B", each.chunk(replicas), where) for each in (k, v))
    yield from _modules(prefix, fused, names, [in_order(q), k, v], shards, where)


FUSIONS: dict[str, Callable[..., Iterator[tuple[str, Tensor]]]] = {
    "FusedLinearsSpec": _linears,
    "GQAQKVColumnParallelLinearSpec": _attention,
}


def _modules(
    prefix: str, fused: str, names: Sequence[str], matrices: Sequence[Tensor], shards: Shards, where: str
) -> Iterator[tuple[str, Tensor]]:
    """A and B of each module of a fused layer."""
    shared = _same(fused, shards.pop(f"{fused}.lora_A.weight"), where)
    for name, matrix in zip(names, matrices, strict=True):
        yield f"{prefix}{name}.lora_A.weight", shared
        yield f"{prefix}{name}.lora_B.weight", matrix


def _take(shards: Shards, name: str, spec: Mapping[str, Any]) -> list[Tensor]:
    parts = shards.pop(name)
    if len(parts) != spec["tp_size"]:
        raise ValueError(f"tp_size={spec['tp_size']}, but there are {counted(len(parts), 'rank')}")
    return parts


def _same(name: str, copies: Sequence[Tensor], where: str) -> Tensor:
    """What several ranks hold a copy of."""
    if not all(torch.equal(copies[0], each) for each in copies[1:]):
        raise UserError(f"{where}: {different_copies(name)}")
    return copies[0]

"""Reads and writes directories of torch.distributed.checkpoint (DCP), such as torchtitan's.

A directory may hold more than the model (optimizer, data loader); its weights may be at the top level or under a
prefix such as `model.`. It stores no model configuration. Tensors have the names of Hugging Face, or torchtitan's.

torchtitan rotates neighboring elements of a query or key, Hugging Face an element of the first half with one of the
second. The rows of these matrices are in another order accordingly.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal, get_args

import torch
from torch import Tensor

from trainyard import models
from trainyard.checkpoint.weights import WeightSource, unfused_tensors
from trainyard.compat.checkpoint import DcpPlace, encode_dcp_metadata
from trainyard.core.atomic_files import atomic_directory, atomic_file
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.tensor_slice import TensorIndex
from trainyard.families.registry import hf_names
from trainyard.formats import hf
from trainyard.formats.dcp.metadata import METADATA_FILE, read_dcp_tensors
from trainyard.formats.format import CheckpointFormat, FormatWriter, WriteOptions
from trainyard.formats.io.async_io import background_fsync, prefetch
from trainyard.formats.io.lazy_tensor import AssembledTensor, LazyTensor
from trainyard.formats.tensor_map import (
    ShardedWeights,
    StoredTensor,
    assemble,
    check_all_stored,
    check_tensors,
    find_mismatched_copy,
)

DcpNames = Literal["hf", "torchtitan", "torchtitan-0.2"]
EARLIER_NAMES = ((re.compile(r"\.qkv_linear\."), "."), (re.compile(r"^lm_head\b"), "output"))
"""What differs in the names of torchtitan up to 0.2."""
ROTATED_NAME = re.compile(r"layers\.\d+\.attention\.(qkv_linear\.)?w[qk]\.weight")
STEP_DIRECTORY = re.compile(r"step-(\d+)")
MAX_FILE_BYTES = 5 * 10**9
"""Size at which the next file begins. A tensor is never split."""


def dcp_tensors(model: models.ModelConfig, names: DcpNames) -> tuple[StoredTensor, ...]:
    """Every tensor of a state dict with these names, tied ones included: dcp.load asks for them."""
    if names == "hf":
        tensors = hf.stored_tensors(model)
        by_name = {stored.name: stored for stored in tensors}
        tied = hf_names(model).tied
        return *tensors, *(rename(by_name[original], copy) for copy, original in tied.items())
    table = models.family_of(model).torchtitan_names
    if table is None:
        raise UserError(f"--layout names={names}: no names of torchtitan for {model.family}; nearest: names=hf")
    unfused, out = unfused_tensors(model), []
    has_tied_head = models.blueprint_of(model).tied_head is not None
    for ours, theirs in table.items():
        for layer in range(model.layers if "*" in ours else 1):
            name, torchtitan_name = (f"{text.replace('*', str(layer))}.weight" for text in (ours, theirs))
            if name == "output.weight" and has_tied_head:
                name = "embedding.weight"
            if name in unfused:  # not a row of the blueprint for other layers
                out.append(StoredTensor(torchtitan_name, 0, (unfused[name],)))
    check_all_stored(model, out, "torchtitan's names")
    return tuple(out) if names == "torchtitan" else tuple(rename(stored, earlier_name(stored.name)) for stored in out)


def rename(stored: StoredTensor, name: str) -> StoredTensor:
    return replace(stored, name=name)


def earlier_name(name: str) -> str:
    """The name of the same tensor in torchtitan 0.2."""
    for pattern, text in EARLIER_NAMES:
        name = pattern.sub(text, name)
    return name


class RotaryRows(LazyTensor):
    """A query or key matrix of torchtitan, with its rows in Hugging Face's order."""

    def __init__(self, tensor: LazyTensor, head_size: int) -> None:
        self._tensor, self._head_size, self.shape, self.dtype = tensor, head_size, tensor.shape, tensor.dtype

    def read_slice(self, index: TensorIndex) -> Tensor:
        rows, *columns = index
        first, size = rows.start // self._head_size * self._head_size, self._head_size
        stop = -(-rows.stop // size) * size
        heads = self._tensor.read((slice(first, stop), *columns))
        heads = heads.reshape(-1, size // 2, 2, heads.shape[1]).transpose(1, 2).reshape(heads.shape)
        return heads[rows.start - first : rows.stop - first]


def torchtitan_rows(tensor: Tensor, head_size: int) -> Tensor:
    """A query or key matrix in Hugging Face's order, with its rows in torchtitan's order."""
    return tensor.view(-1, 2, head_size // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def find_dcp(path: str | Path) -> Path | None:
    """The directory at `path`, or the latest one of a torchtitan run. None: not a DCP checkpoint."""
    path = Path(path).expanduser()
    if (path / METADATA_FILE).is_file():
        return path
    steps = {}
    for directory in (*path.glob("step-*"), *path.glob("checkpoint/step-*")):
        if (match := STEP_DIRECTORY.fullmatch(directory.name)) and (directory / METADATA_FILE).is_file():
            steps[int(match[1])] = directory
    return steps[max(steps)] if steps else None


def open_dcp(path: str | Path, model: models.ModelConfig) -> ShardedWeights:
    """Open the weights at `path`, which have the names of Hugging Face or of torchtitan."""
    directory = find_dcp(path)
    if directory is None:
        raise UserError(f"{path}: not a checkpoint of torch.distributed.checkpoint; expected a file {METADATA_FILE}")
    tensors = read_dcp_tensors(directory)
    has_names = models.family_of(model).torchtitan_names is not None
    styles: tuple[DcpNames, ...] = ("hf", "torchtitan") if has_names else ("hf",)
    expected = {names: {stored.name: stored for stored in dcp_tensors(model, names)} for names in styles}
    anchors = {names: next(iter(expected[names])) for names in styles}  # the embedding
    for names, anchor in anchors.items():
        prefixes = [key.removesuffix(anchor) for key in tensors if key == anchor or key.endswith(f".{anchor}")]
        if prefixes:
            selected, notes = _select_model(tensors, min(prefixes, key=len), expected[names])
            if names == "torchtitan":
                weights = _open_torchtitan(model, selected)
            else:
                weights = hf.weights_from_tensors(model, selected)
            weights.notes = (*([f"reading {directory}"] if directory != Path(path).expanduser() else ()), *notes)
            return weights
    found = f"it has {', '.join(list(tensors)[:3])}, ..." if tensors else "it has no tensors"
    raise UserError(f"{directory}: no tensor is called {' or '.join(anchors.values())}; {found}")


def _select_model(
    tensors: Mapping[str, AssembledTensor], prefix: str, expected: Iterable[str]
) -> tuple[dict[str, LazyTensor], list[str]]:
    """The tensors of the model, without the prefix of their names, and a note that names what else there is."""
    modules = {name.partition(".")[0] for name in (*expected, *map(earlier_name, expected))}
    selected: dict[str, LazyTensor] = {}
    others: dict[str, int] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(prefix)
        module = name.partition(".")[0]
        if key.startswith(prefix) and module in modules:
            tensor.check_complete()
            selected[name] = tensor
        else:
            owner = ".".join(key.split(".")[: max(prefix.count("."), 1)])
            others[owner] = others.get(owner, 0) + 1
    return selected, [f"not read: {counted(count, 'tensor')} of {name}" for name, count in others.items()]


def _open_torchtitan(model: models.ModelConfig, tensors: Mapping[str, LazyTensor]) -> ShardedWeights:
    expected = {stored.name: stored for stored in dcp_tensors(model, "torchtitan")}
    current_name = {earlier_name(name): name for name in expected}
    tensors = {current_name.get(name, name): tensor for name, tensor in tensors.items()}
    embedding, *_, head = expected
    tied = models.blueprint_of(model).tied_head is not None
    if tied and head not in tensors:
        del expected[head]
    check_tensors("checkpoint", expected, tensors)
    pairs: list[tuple[StoredTensor, LazyTensor]] = []
    for name, stored in expected.items():
        tensor = tensors[name]
        pairs.append((stored, RotaryRows(tensor, model.head_size) if ROTATED_NAME.fullmatch(name) else tensor))
    if tied and find_mismatched_copy(pair for pair in pairs if pair[0].name in (embedding, head)):
        raise UserError(f"checkpoint does not fit the model: {embedding} and {head} differ, but the model ties them")
    return ShardedWeights(model, pairs)


def write_dcp(
    directory: Path,
    weights: WeightSource,
    names: DcpNames = "hf",
    dtype: torch.dtype | None = None,
    progress: Callable[[int], None] = lambda count: None,
    write_extra_files: Callable[[Path], None] = lambda directory: None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a directory that dcp.load reads. `dtype` None keeps the dtypes of `weights`.

    `write_extra_files` adds files to the directory before it gets its name.
    """
    model = weights.model
    tensors = dcp_tensors(model, names)
    producers = (partial(_assemble, stored, weights, dtype, names) for stored in tensors)
    places: dict[str, DcpPlace] = {}
    with atomic_directory(directory) as temporary:
        with background_fsync() as close:
            file: BinaryIO | None = None
            for stored, tensor in zip(tensors, prefetch(producers), strict=True):
                if file is None or file.tell() >= max_file_bytes:
                    if file:
                        close(file)
                    file = (temporary / f"__0_{len({place.file for place in places.values()})}.distcp").open("wb")
                start = file.tell()
                torch.save(tensor, file)
                name = Path(file.name).name
                places[stored.name] = DcpPlace(name, start, file.tell() - start, tuple(tensor.shape), tensor.dtype)
                progress(tensor.nbytes)
            if file:
                close(file)
        write_extra_files(temporary)
        with atomic_file(temporary / METADATA_FILE) as metadata_file:
            metadata_file.write(encode_dcp_metadata(places))


def _assemble(stored: StoredTensor, weights: WeightSource, dtype: torch.dtype | None, names: DcpNames) -> Tensor:
    tensor = assemble(stored, weights, dtype)
    if names != "hf" and ROTATED_NAME.fullmatch(stored.name):
        tensor = torchtitan_rows(tensor, weights.model.head_size)
    # torch.save writes the whole storage that a tensor is a view of.
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _write(directory: Path, weights: WeightSource, options: WriteOptions) -> None:
    names = options.layout.get("names", "hf")
    write_dcp(directory, weights, names, options.dtype, options.progress, options.write_extra_files)


FORMAT = CheckpointFormat(
    "dcp",
    "a checkpoint of torch.distributed.checkpoint",
    find_dcp,
    lambda path, model, hints: open_dcp(path, model),
    stores_model=False,
    writer=FormatWriter(
        lambda model, layout: dcp_tensors(model, layout.get("names", "hf")),
        _write,
        {"names": get_args(DcpNames)},
        layout_example="names=torchtitan",
    ),
)

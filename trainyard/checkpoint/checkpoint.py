"""The checkpoints of a run: lists, commits and removes them, and reads one at any layout.

    DIRECTORY/step_00000100/rank_00000.safetensors ...    one file per rank
    DIRECTORY/step_00000100/tokenizer.json ...            files of the tokenizer, if it is known
    DIRECTORY/step_00000100/complete.json                 commit file, written last: contents of the files, run state

A directory without `complete.json` is not a checkpoint. The commit file holds all that a reader needs, above all which
slices are in which file, so that a rank of any layout reads exactly the bytes it needs. A run saves what it trains; the
commit file says where all other weights come from (`base`).
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from trainyard import __version__, models
from trainyard.checkpoint.file_names import COMMIT_FILE, STEP_DIRECTORY, shard_name, step_directory
from trainyard.checkpoint.partition import owned_slices
from trainyard.checkpoint.safetensors_file import CODE_BY_DTYPE, DTYPE_BY_CODE
from trainyard.checkpoint.shard_file import CorruptCheckpoint, ShardFile
from trainyard.checkpoint.weights import BaseWeights, TrainingState, WeightSource, frozen_tensors, unfused_tensors
from trainyard.config.load import parse
from trainyard.core.errors import UserError, one_line
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.blueprint import Blueprint
from trainyard.parallel.layout import Layout
from trainyard.remote.model_files import MODEL_FILES
from trainyard.remote.storage import Storage

FORMAT_VERSION = 1
STATE_KINDS = ("weights", "first", "second")
"""State that the built-in optimizers save for every parameter, by the names in the files: master weights (or the
weights if there are none), exp_avg and exp_avg_sq. The state of a user's update rule has the names that it gives."""
COUNTERS = ("step", "updates", "skipped", "consumed_samples", "data_files", "base")


def tensor_key(kind: str, name: str) -> str:
    """The name of a tensor in the files."""
    return f"{kind}.{name}"


def list_steps(storage: Storage) -> list[int]:
    """Steps of all checkpoint directories, committed or not, latest first."""
    matches = (STEP_DIRECTORY.fullmatch(name) for name in storage.listdir())
    return sorted((int(match.group(1)) for match in matches if match), reverse=True)


def is_committed(storage: Storage, step: int) -> bool:
    return (storage / step_directory(step)).file_size(COMMIT_FILE) is not None


def latest_checkpoint(storage: Storage) -> Storage | None:
    """The native checkpoint at `storage`, or the latest committed one in it or in its subdirectory checkpoints/."""
    if storage.file_size(COMMIT_FILE) is not None:
        return storage
    for directory in (storage, storage / "checkpoints"):
        for step in list_steps(directory):
            if is_committed(directory, step):
                return directory / step_directory(step)
    return None


def remove_checkpoint(storage: Storage, step: int) -> None:
    """Remove the commit file first, so that a kill in between does not leave an incomplete checkpoint."""
    (storage / step_directory(step)).remove(COMMIT_FILE)
    storage.remove(step_directory(step))


def remove_incomplete(storage: Storage) -> None:
    """Remove what killed runs left behind: uncommitted checkpoints and temporary files."""
    for name in storage.listdir():
        if name.startswith(".") and name.endswith(".part"):
            storage.remove(name)
    for step in list_steps(storage):
        if not is_committed(storage, step):
            remove_checkpoint(storage, step)


def prune_checkpoints(storage: Storage, newest: int, keep: int, is_own: Callable[[int], bool]) -> None:
    """Keep the last `keep` (0: all) checkpoints of a run up to step `newest`; `is_own` tells its steps.

    Checkpoints of later steps are corrupt: the run has resumed from an earlier one. They do not count; otherwise they
    would displace the checkpoint just written.
    """
    if keep:
        committed = (step for step in list_steps(storage) if step <= newest and is_committed(storage, step))
        for step in list(filter(is_own, committed))[keep:]:
            remove_checkpoint(storage, step)


ShardTable = dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...]]]]
"""The slices in each file: tensor name, offsets and sizes."""


def build_shard_table(blueprint: Blueprint, layout: Layout, names: Sequence[str] | None = None) -> ShardTable:
    """The table of a checkpoint of all parameters, or of `names`."""
    return {
        shard_name(rank): [
            (piece.name, piece.offsets, piece.sizes) for piece in owned_slices(blueprint, layout, rank, names)
        ]
        for rank in range(layout.world_size)
    }


def build_manifest(
    config: Mapping[str, Any], dtypes: Mapping[str, torch.dtype], counters: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of a commit file, except for the files and the format version. Its keys are part of the format.
    `config` has all keys of the configuration."""
    return {
        **counters,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"trainyard": __version__, "torch": version("torch")},
        "kinds": {kind: CODE_BY_DTYPE[dtype] for kind, dtype in dtypes.items()},
        "config": config,
    }


def commit(
    storage: Storage, table: ShardTable, manifest: dict[str, Any], model_files: Mapping[str, bytes] | None = None
) -> int:
    """Write the files of the tokenizer and the commit file once all shards exist. Returns the size of the checkpoint in
    bytes."""
    sizes: dict[str, int] = {}
    for name in table:
        size = storage.file_size(name)
        if size is None:
            raise UserError(
                f"{storage}/{name}: not visible on this host; checkpoint.directory must be shared by all hosts"
            )
        sizes[name] = size
    checksums = {}
    for name, data in (model_files or {}).items():
        with storage.write(name) as file:
            file.write(data)
        checksums[name] = f"{zlib.crc32(data):08x}"
    write_commit_file(storage, table, sizes, {**manifest, "model_files": checksums})
    return sum(sizes.values())


def write_commit_file(
    storage: Storage, table: ShardTable, sizes: Mapping[str, int], manifest: Mapping[str, Any]
) -> None:
    """Write the commit file of shards with these sizes in bytes."""
    files = {name: {"bytes": sizes[name], "boxes": slices} for name, slices in table.items()}
    text = json.dumps({"format": FORMAT_VERSION, **manifest, "files": files})
    with storage.write(COMMIT_FILE) as file:
        file.write(f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode())


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """A committed checkpoint, open for reading. It is a WeightSource.

    Every tensor is compared with its checksum when it is first read, unless all files were verified before. Weights
    that are not stored, because the run did not train them, are read from where the run had them.
    """

    open_base: Callable[[BaseWeights, models.ModelConfig], WeightSource]
    """Opens them; `formats/registry.py` knows all formats."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.manifest = read_commit_file(storage)
        try:
            self.step = int(self.manifest["step"])
            self.dtypes = {kind: DTYPE_BY_CODE[code] for kind, code in self.manifest["kinds"].items()}
            self.config = parse(self.manifest["config"])
            self.saved_slices = self._read_slices()
            base = self.manifest.get("base")
            self.base = BaseWeights(**base) if base else None
        except UserError as error:  # the file is as it was written: since then, a family or a version has changed
            problem = str(error).partition("; nearest")[0]
            raise UserError(f"{storage}: does not fit the installed code: {problem}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpoint(f"{storage}/{COMMIT_FILE}: corrupt: {one_line(error)}") from None
        self.bytes_read = 0
        self.all_verified = False
        """True if this process, or all ranks together, verified all files."""
        self._open_shards: dict[str, ShardFile] = {}
        self._stack = ExitStack()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, which are opened again if they are read again."""
        self._open_shards.clear()
        self._stack.close()

    @property
    def model(self) -> models.ModelConfig:
        return self.config.model

    @property
    def files(self) -> list[str]:
        return list(self.manifest["files"])

    def dtype(self, name: str) -> torch.dtype:
        return self._base_weights.dtype(name) if name in self.unstored else self.dtypes["weights"]

    def read(self, piece: TensorSlice) -> Tensor:
        return self._base_weights.read(piece) if piece.name in self.unstored else self.read_state("weights", piece)

    @cached_property
    def unstored(self) -> frozenset[str]:
        """The unfused tensors that the run did not train and that are not stored."""
        return frozen_tensors(self.model) - self.saved_slices.keys()

    @cached_property
    def _base_weights(self) -> WeightSource:
        if not self.base:
            raise UserError(f"{self.storage}: holds trained weights only; the script of its run made the others")
        try:
            return self.open_base(self.base, self.model)
        except UserError as error:
            raise UserError(f"{self.storage}: holds trained weights only; of the others: {error}") from None

    @property
    def state(self) -> TrainingState:
        counters = {key: self.manifest[key] for key in COUNTERS if key in self.manifest}
        readers = {kind: partial(self.read_state, kind) for kind in self.dtypes} | {"weights": self.read}
        return TrainingState(self.model, self.dtypes, readers, counters)

    def read_state(self, kind: str, piece: TensorSlice) -> Tensor:
        """Read a slice of an unfused tensor from all files that hold a part of it."""
        key = tensor_key(kind, piece.name)
        out: Tensor | None = None
        elements_read = 0
        for file, saved in self.saved_slices.get(piece.name, ()):
            overlap = piece.intersect(saved)
            if overlap is None:
                continue
            tensor = self._shard(file).read(key, overlap.to_index(saved.offsets), verify=not self.all_verified)
            self.bytes_read += tensor.nbytes
            elements_read += tensor.numel()
            if tensor.shape == piece.sizes:
                return tensor
            if out is None:
                out = tensor.new_empty(piece.sizes)
            out[overlap.to_index(piece.offsets)] = tensor
        if out is None or elements_read != piece.numel:
            raise CorruptCheckpoint(f"{self.storage}: {piece.name} is incomplete")
        return out

    def files_with(self, piece: TensorSlice) -> list[str]:
        """The files that hold parts of a slice."""
        return [file for file, saved in self.saved_slices.get(piece.name, ()) if piece.intersect(saved)]

    def fetch(self, files: set[str]) -> None:
        """Make files readable on this host. All ranks call this before they read. Here all hosts share them."""

    def rank_extras(self, rank: int) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """Tensors and header metadata that a rank saved for itself only (random generators); None: no such rank."""
        if shard_name(rank) not in self.manifest["files"]:
            return None
        shard = self._shard(shard_name(rank))
        keys = (key for key in shard.entries if key.split(".")[0] not in self.dtypes)
        full = {key: TensorSlice.full(key, shard.entries[key].shape).to_index() for key in keys}
        return {key: shard.read(key, index) for key, index in full.items()}, shard.metadata

    def read_model_files(self) -> dict[str, bytes]:
        """The contents of the tokenizer's files by name, compared with their checksums."""
        out: dict[str, bytes] = {}
        for name, checksum in self.manifest.get("model_files", {}).items():
            if not MODEL_FILES.fullmatch(name):
                raise CorruptCheckpoint(f"{self.storage}/{COMMIT_FILE}: corrupt: names a file {name!a}")
            try:
                with self.storage.open(name) as file:
                    out[name] = bytes(file.read(0, file.size))
            except OSError as error:
                raise CorruptCheckpoint(f"{self.storage}/{name}: corrupt: {error.strerror or 'no such file'}") from None
            if f"{zlib.crc32(out[name]):08x}" != checksum:
                raise CorruptCheckpoint(f"{self.storage}/{name}: corrupt: its checksum differs")
        return out

    def verify(self, files: list[str]) -> None:
        """Compare the sizes and checksums of these files with the commit file; the error names the first bad file."""
        for file in files:
            self._shard(file).verify()

    def _read_slices(self) -> dict[str, list[tuple[str, TensorSlice]]]:
        """The files that hold each unfused tensor, and which slice of it each file holds."""
        tensors = unfused_tensors(self.model)
        out: dict[str, list[tuple[str, TensorSlice]]] = {}
        for file, entry in self.manifest["files"].items():
            for name, offsets, sizes in entry["boxes"]:
                if name not in tensors:
                    raise UserError(f"model.family={self.model.family}: has no tensor {name}, which the checkpoint has")
                piece = TensorSlice(name, tensors[name].global_shape, tuple(offsets), tuple(sizes))
                out.setdefault(name, []).append((file, piece))
        return out

    def _shard(self, name: str) -> ShardFile:
        if name not in self._open_shards:
            try:
                file = self._stack.enter_context(self.storage.open(name))
            except OSError as error:
                raise CorruptCheckpoint(f"{self.storage}/{name}: corrupt: {error.strerror or 'no such file'}") from None
            if file.size != (expected := self.manifest["files"][name]["bytes"]):
                raise CorruptCheckpoint(f"{self.storage}/{name}: corrupt: {file.size:,} bytes of {expected:,}")
            shard = ShardFile(file, f"{self.storage}/{name}")
            for tensor, _, sizes in self.manifest["files"][name]["boxes"]:
                for kind, dtype in self.dtypes.items():
                    entry = shard.entries.get(key := tensor_key(kind, tensor))
                    if not entry or (entry.shape, entry.dtype) != (tuple(sizes), dtype):
                        raise CorruptCheckpoint(f"{self.storage}/{name}: corrupt: {key} is not what was written")
            self._open_shards[name] = shard
        return self._open_shards[name]


def read_commit_file(storage: Storage) -> dict[str, Any]:
    """The manifest of a committed checkpoint."""
    path = f"{storage}/{COMMIT_FILE}"
    try:
        with storage.open(COMMIT_FILE) as file:
            text = bytes(file.read(0, file.size)).decode()
    except FileNotFoundError:
        raise UserError(f"{storage}: not a checkpoint: it has no {COMMIT_FILE}") from None
    except (OSError, UnicodeDecodeError, EOFError):
        raise CorruptCheckpoint(f"{path}: corrupt: cannot be read") from None
    body, _, crc = text.rstrip("\n").rpartition("\n")
    if f"{zlib.crc32(body.encode()):08x}" != crc:
        raise CorruptCheckpoint(f"{path}: corrupt: its checksum differs")
    try:
        manifest: dict[str, Any] = json.loads(body)
    except (ValueError, RecursionError):
        raise CorruptCheckpoint(f"{path}: corrupt: not JSON") from None
    if manifest.get("format") != FORMAT_VERSION:
        raise UserError(f"{path}: format {manifest.get('format')}; this version reads {FORMAT_VERSION}")
    return manifest

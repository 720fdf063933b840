"""A run's checkpoints: which are there, which are whole, what is in one.

    DIRECTORY/step_00000100/rank_00000.safetensors ...    one file for each rank
    DIRECTORY/step_00000100/complete.json                 written last: what the files hold, and how the run stood

Without `complete.json` a directory is no checkpoint. It has everything that a reader needs to know, the boxes of parts
in each file first of all, so that a rank of any layout reads its own pieces and nothing else.
"""

import json
import re
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from trainyard import models
from trainyard.checkpoint.formats.tensor_map import TensorIndex
from trainyard.checkpoint.io.safetensors_file import DTYPE_BY_CODE
from trainyard.checkpoint.io.storage import Storage
from trainyard.checkpoint.native.partition import LocalSlice, owned_slices
from trainyard.checkpoint.native.shard_file import CorruptCheckpoint, ShardFile
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.models.blueprint import Blueprint
from trainyard.parallel.layout import Layout

COMMIT_FILE = "complete.json"
FORMAT_VERSION = 1
STATE_KINDS = ("weights", "first", "second")
"""What is kept of every parameter: its values at the best precision held, and the optimizer's two moments."""
STEP_DIRECTORY = re.compile(r"step_(\d{8,})")


def step_directory(step: int) -> str:
    return f"step_{step:08d}"


def shard_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def tensor_key(kind: str, name: str) -> str:
    """A tensor's name in the files."""
    return f"{kind}.{name}"


def list_steps(storage: Storage) -> list[int]:
    """Steps of every directory that looks like a checkpoint, whole or not, newest first."""
    found = (STEP_DIRECTORY.fullmatch(name) for name in storage.listdir())
    return sorted((int(match.group(1)) for match in found if match), reverse=True)


def is_committed(storage: Storage, step: int) -> bool:
    return (storage / step_directory(step)).file_size(COMMIT_FILE) is not None


def remove_checkpoint(storage: Storage, step: int) -> None:
    """The marker goes first: what is left over after a kill is no checkpoint."""
    (storage / step_directory(step)).remove(COMMIT_FILE)
    storage.remove(step_directory(step))


def remove_incomplete(storage: Storage) -> None:
    """Take away what kills have left over: directories without a marker, files that never got their name."""
    for name in storage.listdir():
        if name.startswith(".") and name.endswith(".part"):
            storage.remove(name)
    for step in list_steps(storage):
        if not is_committed(storage, step):
            remove_checkpoint(storage, step)


def prune_checkpoints(storage: Storage, newest: int, keep: int) -> None:
    """Keep so many (0: all) of those up to step `newest`. Later ones are broken, or of a run that this one branched off
    from; they do not count, or they would push out what was just written."""
    complete = [step for step in list_steps(storage) if step <= newest and is_committed(storage, step)]
    for step in complete[keep or len(complete) :]:
        remove_checkpoint(storage, step)


ShardTable = dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...]]]]
"""For each file the part, offsets and sizes of its boxes."""


def build_shard_table(blueprint: Blueprint, layout: Layout) -> ShardTable:
    return {
        shard_name(rank): [(box.tensor_name, box.offsets, box.sizes) for box in owned_slices(blueprint, layout, rank)]
        for rank in range(layout.world_size)
    }


def commit(storage: Storage, table: ShardTable, manifest: dict[str, Any]) -> int:
    """Every file is there: write the marker. Returns the bytes of the whole checkpoint."""
    files: dict[str, Any] = {}
    for name, held in table.items():
        size = storage.file_size(name)
        if size is None:
            raise UserError(f"{storage}/{name}: not seen here; checkpoint.directory must be shared by all hosts")
        files[name] = {"bytes": size, "boxes": held}
    text = json.dumps({"format": FORMAT_VERSION, **manifest, "files": files})
    with storage.write(COMMIT_FILE) as file:
        file.write(f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode())
    return sum(entry["bytes"] for entry in files.values())


@dataclass(frozen=True)
class _SavedSlice:
    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Checkpoint:
    """A whole checkpoint, open for reading. It is `Weights` too: of a model as the run had it."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.manifest = _read_manifest(storage)
        try:
            self.step = int(self.manifest["step"])
            self.dtypes = {kind: DTYPE_BY_CODE[code] for kind, code in self.manifest["kinds"].items()}
            self.config: Config = parse(self.manifest["config"])
            self.saved_slices: dict[str, list[_SavedSlice]] = {}
            for file, entry in self.manifest["files"].items():
                for part, offsets, sizes in entry["boxes"]:
                    self.saved_slices.setdefault(part, []).append(_SavedSlice(file, tuple(offsets), tuple(sizes)))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpoint(f"{storage}/{COMMIT_FILE}: broken: {' '.join(str(error).split())}") from None
        self.bytes_read = 0
        self._open_shards: dict[str, ShardFile] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    @property
    def model(self) -> models.AnyModelConfig:
        return self.config.model

    @property
    def files(self) -> list[str]:
        return list(self.manifest["files"])

    def dtype(self, name: str) -> torch.dtype:
        return self.dtypes["weights"]

    def read(self, name: str, index: TensorIndex) -> Tensor:
        offsets = tuple(each.start for each in index)
        sizes = tuple(each.stop - each.start for each in index)
        return self.read_state("weights", LocalSlice(name, name, sizes, offsets, sizes, offsets))

    def read_state(self, kind: str, box: LocalSlice) -> Tensor:
        """A box of a part, from whichever files hold some of it."""
        key = tensor_key(kind, box.tensor_name)
        out: Tensor | None = None
        found = 0
        for saved in self.saved_slices.get(box.tensor_name, ()):
            begin = [max(a, b) for a, b in zip(box.offsets, saved.offsets, strict=True)]
            end = [
                min(a + n, b + m) for a, n, b, m in zip(box.offsets, box.sizes, saved.offsets, saved.sizes, strict=True)
            ]
            if any(b >= e for b, e in zip(begin, end, strict=True)):
                continue
            region = [(b - at, e - at) for b, e, at in zip(begin, end, saved.offsets, strict=True)]
            piece = self._shard(saved.file).read(key, region)
            self.bytes_read += piece.nbytes
            found += piece.numel()
            if piece.shape == box.sizes:
                return piece
            if out is None:
                out = piece.new_empty(box.sizes)
            out[tuple(slice(b - at, e - at) for b, e, at in zip(begin, end, box.offsets, strict=True))] = piece
        if out is None or found != box.numel:
            raise CorruptCheckpoint(f"{self.storage}: {box.tensor_name} is not all there")
        return out

    def rank_extras(self, rank: int) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """What a rank kept for itself: tensors by name, and texts; None where no such rank was."""
        if shard_name(rank) not in self.manifest["files"]:
            return None
        shard = self._shard(shard_name(rank))
        own = {key: entry for key, entry in shard.entries.items() if key.split(".")[0] not in STATE_KINDS}
        return {key: shard.read(key, [(0, size) for size in entry.shape]) for key, entry in own.items()}, shard.metadata

    def verify(self, files: list[str]) -> None:
        """Compare sizes and checksums of these files; the first that is not as it was written is named."""
        for name in files:
            shard = self._shard(name)
            shard.verify()
            for part, _, sizes in self.manifest["files"][name]["boxes"]:
                for kind, dtype in self.dtypes.items():
                    entry = shard.entries.get(tensor_key(kind, part))
                    if not entry or (entry.shape, entry.dtype) != (tuple(sizes), dtype):
                        raise CorruptCheckpoint(
                            f"{self.storage}/{name}: broken: {tensor_key(kind, part)} is not as it was written"
                        )

    def _shard(self, name: str) -> ShardFile:
        if name not in self._open_shards:
            try:
                file = self._stack.enter_context(self.storage.open(name))
            except OSError as error:
                raise CorruptCheckpoint(f"{self.storage}/{name}: broken: {error.strerror or 'no such file'}") from None
            if file.size != self.manifest["files"][name]["bytes"]:
                expected = self.manifest["files"][name]["bytes"]
                raise CorruptCheckpoint(f"{self.storage}/{name}: broken: {file.size:,} bytes of {expected:,}")
            self._open_shards[name] = ShardFile(file, f"{self.storage}/{name}")
        return self._open_shards[name]


def _read_manifest(storage: Storage) -> dict[str, Any]:
    where = f"{storage}/{COMMIT_FILE}"
    try:
        with storage.open(COMMIT_FILE) as file:
            text = bytes(file.read(0, file.size)).decode()
    except FileNotFoundError:
        raise UserError(f"{storage}: no checkpoint: it has no {COMMIT_FILE}") from None
    except (OSError, UnicodeDecodeError, EOFError):
        raise CorruptCheckpoint(f"{where}: broken: it cannot be read") from None
    body, _, crc = text.rstrip("\n").rpartition("\n")
    if f"{zlib.crc32(body.encode()):08x}" != crc:
        raise CorruptCheckpoint(f"{where}: broken: its checksum differs")
    parsed: dict[str, Any] = json.loads(body)
    if parsed.get("format") != FORMAT_VERSION:
        raise UserError(f"{where}: format {parsed.get('format')}; this version reads {FORMAT_VERSION}")
    return parsed

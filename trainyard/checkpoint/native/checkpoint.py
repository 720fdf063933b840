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
from trainyard.checkpoint.formats.tensor_map import Region
from trainyard.checkpoint.io.safetensors_file import DTYPES
from trainyard.checkpoint.io.storage import Place
from trainyard.checkpoint.native.partition import Box, written
from trainyard.checkpoint.native.shard_file import Broken, Shard
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.models.blueprint import Blueprint
from trainyard.parallel.layout import Layout

MARKER = "complete.json"
FORMAT = 1
KINDS = ("weights", "first", "second")
"""What is kept of every parameter: its values at the best precision held, and the optimizer's two moments."""
NAME = re.compile(r"step_(\d{8,})")


def directory_name(step: int) -> str:
    return f"step_{step:08d}"


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def key_of(kind: str, part: str) -> str:
    """A tensor's name in the files."""
    return f"{kind}.{part}"


def steps_in(place: Place) -> list[int]:
    """Steps of every directory that looks like a checkpoint, whole or not, newest first."""
    found = (NAME.fullmatch(name) for name in place.names())
    return sorted((int(match.group(1)) for match in found if match), reverse=True)


def is_complete(place: Place, step: int) -> bool:
    return (place / directory_name(step)).size(MARKER) is not None


def remove(place: Place, step: int) -> None:
    """The marker goes first: what is left over after a kill is no checkpoint."""
    (place / directory_name(step)).remove(MARKER)
    place.remove(directory_name(step))


def clear(place: Place) -> None:
    """Take away what kills have left over: directories without a marker, files that never got their name."""
    for name in place.names():
        if name.startswith(".") and name.endswith(".part"):
            place.remove(name)
    for step in steps_in(place):
        if not is_complete(place, step):
            remove(place, step)


def prune(place: Place, newest: int, keep: int) -> None:
    """Keep so many (0: all) of those up to step `newest`. Later ones are broken, or of a run that this one branched off
    from; they do not count, or they would push out what was just written."""
    complete = [step for step in steps_in(place) if step <= newest and is_complete(place, step)]
    for step in complete[keep or len(complete) :]:
        remove(place, step)


Table = dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...]]]]
"""For each file the part, offsets and sizes of its boxes."""


def table_of(blueprint: Blueprint, layout: Layout) -> Table:
    return {
        file_name(rank): [(box.part, box.offsets, box.sizes) for box in written(blueprint, layout, rank)]
        for rank in range(layout.world)
    }


def seal(place: Place, table: Table, body: dict[str, Any]) -> int:
    """Every file is there: write the marker. Returns the bytes of the whole checkpoint."""
    files: dict[str, Any] = {}
    for name, held in table.items():
        size = place.size(name)
        if size is None:
            raise UserError(f"{place}/{name}: not seen here; checkpoint.directory must be shared by all hosts")
        files[name] = {"bytes": size, "boxes": held}
    text = json.dumps({"format": FORMAT, **body, "files": files})
    with place.write(MARKER) as file:
        file.write(f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode())
    return sum(entry["bytes"] for entry in files.values())


@dataclass(frozen=True)
class _Saved:
    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Checkpoint:
    """A whole checkpoint, open for reading. It is `Weights` too: of a model as the run had it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.body = _body(place)
        try:
            self.step = int(self.body["step"])
            self.dtypes = {kind: DTYPES[code] for kind, code in self.body["kinds"].items()}
            self.config: Config = parse(self.body["config"])
            self.saved: dict[str, list[_Saved]] = {}
            for file, entry in self.body["files"].items():
                for part, offsets, sizes in entry["boxes"]:
                    self.saved.setdefault(part, []).append(_Saved(file, tuple(offsets), tuple(sizes)))
        except (KeyError, TypeError, ValueError) as error:
            raise Broken(f"{place}/{MARKER}: broken: {' '.join(str(error).split())}") from None
        self.bytes_read = 0
        self._open: dict[str, Shard] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    @property
    def model(self) -> models.AnyModel:
        return self.config.model

    @property
    def files(self) -> list[str]:
        return list(self.body["files"])

    def dtype(self, part: str) -> torch.dtype:
        return self.dtypes["weights"]

    def read(self, part: str, region: Region) -> Tensor:
        offsets = tuple(each.start for each in region)
        sizes = tuple(each.stop - each.start for each in region)
        return self.tensor("weights", Box(part, part, sizes, offsets, sizes, offsets))

    def tensor(self, kind: str, box: Box) -> Tensor:
        """A box of a part, from whichever files hold some of it."""
        key = key_of(kind, box.part)
        out: Tensor | None = None
        found = 0
        for saved in self.saved.get(box.part, ()):
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
        if out is None or found != box.count:
            raise Broken(f"{self.place}: {box.part} is not all there")
        return out

    def extra(self, rank: int) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """What a rank kept for itself: tensors by name, and texts; None where no such rank was."""
        if file_name(rank) not in self.body["files"]:
            return None
        shard = self._shard(file_name(rank))
        own = {key: entry for key, entry in shard.entries.items() if key.split(".")[0] not in KINDS}
        return {key: shard.read(key, [(0, size) for size in entry.shape]) for key, entry in own.items()}, shard.extra

    def check(self, files: list[str]) -> None:
        """Compare sizes and checksums of these files; the first that is not as it was written is named."""
        for name in files:
            shard = self._shard(name)
            shard.check()
            for part, _, sizes in self.body["files"][name]["boxes"]:
                for kind, dtype in self.dtypes.items():
                    entry = shard.entries.get(key_of(kind, part))
                    if not entry or (entry.shape, entry.dtype) != (tuple(sizes), dtype):
                        raise Broken(f"{self.place}/{name}: broken: {key_of(kind, part)} is not as it was written")

    def _shard(self, name: str) -> Shard:
        if name not in self._open:
            try:
                file = self._stack.enter_context(self.place.open(name))
            except OSError as error:
                raise Broken(f"{self.place}/{name}: broken: {error.strerror or 'no such file'}") from None
            if file.size != self.body["files"][name]["bytes"]:
                expected = self.body["files"][name]["bytes"]
                raise Broken(f"{self.place}/{name}: broken: {file.size:,} bytes of {expected:,}")
            self._open[name] = Shard(file, f"{self.place}/{name}")
        return self._open[name]


def _body(place: Place) -> dict[str, Any]:
    where = f"{place}/{MARKER}"
    try:
        with place.open(MARKER) as file:
            text = bytes(file.read(0, file.size)).decode()
    except FileNotFoundError:
        raise UserError(f"{place}: no checkpoint: it has no {MARKER}") from None
    except (OSError, UnicodeDecodeError, EOFError):
        raise Broken(f"{where}: broken: it cannot be read") from None
    body, _, crc = text.rstrip("\n").rpartition("\n")
    if f"{zlib.crc32(body.encode()):08x}" != crc:
        raise Broken(f"{where}: broken: its checksum differs")
    parsed: dict[str, Any] = json.loads(body)
    if parsed.get("format") != FORMAT:
        raise UserError(f"{where}: format {parsed.get('format')}; this version reads {FORMAT}")
    return parsed

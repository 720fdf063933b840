"""Writes rows of tokens as the datasets library's save_to_disk would: the layout is told in arrow.py."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from trainyard.core.atomic_files import sync_directory
from trainyard.core.errors import UserError
from trainyard.data.formats.arrow_dataset import INFO, STATE, Numbers

SHARD = 500 << 20
"""Bytes of a data file, at which the next begins: the library's own limit."""


class Writer:
    """Fills a hidden directory beside `directory`, which gets its name when all is there; the old one goes then."""

    def __init__(self, directory: Path, columns: dict[str, str], overwrite: bool = False, shard: int = SHARD) -> None:
        """`columns`: the dtype of each."""
        self.directory = _free(directory, overwrite)
        self.columns, self.shard = columns, shard
        self.schema = pa.schema([(name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in columns.items()])
        self.hash = hashlib.sha256(str(columns).encode())
        self.parts: list[Path] = []
        self.file: Any = None
        self.stream: Any = None
        self.description = ""
        prefix = f".{self.directory.name}."
        self.place = Path(tempfile.mkdtemp(dir=self.directory.parent, prefix=prefix, suffix=".part"))

    def add(self, rows: dict[str, Numbers]) -> None:
        """A batch: for each column an array [rows, tokens]."""
        if self.stream is None:
            self.parts.append(self.place / f"part-{len(self.parts):05d}")
            self.file = pa.OSFile(str(self.parts[-1]), "wb")
            self.stream = pa.ipc.new_stream(self.file, self.schema)
        arrays = []
        for name, dtype in self.columns.items():
            values = np.ascontiguousarray(rows[name])
            assert values.dtype == dtype
            ends = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
            arrays.append(pa.ListArray.from_arrays(pa.array(ends), pa.array(values.reshape(-1))))
            if name != "labels":  # they follow from the rest
                self.hash.update(values.data)
        self.stream.write_batch(pa.record_batch(arrays, schema=self.schema))
        if self.file.tell() >= self.shard:
            self._end_part()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if self.stream is not None:
                self._end_part()
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self.place, ignore_errors=True)

    def _end_part(self) -> None:
        self.stream.close()
        self.file.close()
        self.stream = None

    def _finish(self) -> None:
        names = [f"data-{number:05d}-of-{len(self.parts):05d}.arrow" for number in range(len(self.parts))]
        for part, name in zip(self.parts, names, strict=True):
            part.rename(self.place / name)
        # The older of the library's two names for lists: all of its versions know it.
        features = {
            name: {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "Sequence"}
            for name, dtype in self.columns.items()
        }
        info = {"citation": "", "description": self.description, "features": features, "homepage": "", "license": ""}
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": self.hash.hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        for name, content in ((INFO, info), (STATE, state)):
            (self.place / name).write_text(json.dumps(content, indent=2))
        for name in (*names, INFO, STATE):
            with (self.place / name).open("rb") as file:
                os.fsync(file.fileno())
        self.place.chmod(0o755)
        sync_directory(self.place)
        old = self.place.with_suffix(".old")
        if self.directory.exists():
            self.directory.rename(old)
        self.place.rename(self.directory)
        sync_directory(self.directory.parent)
        shutil.rmtree(old, ignore_errors=True)


def _free(directory: Path, overwrite: bool) -> Path:
    """Where a new directory may go. Only what is empty or was saved by this kind of writer is ever replaced."""
    directory = directory.expanduser().resolve()
    if not directory.parent.is_dir() or not os.access(directory.parent, os.W_OK):
        raise UserError(f"{directory}: {directory.parent} is no directory that can be written to")
    if directory.exists():
        if not directory.is_dir() or (any(directory.iterdir()) and not (directory / STATE).is_file()):
            raise UserError(f"{directory}: is there and is not a saved data set, so it is kept; choose another name")
        if any(directory.iterdir()) and not overwrite:
            raise UserError(f"{directory}: is there already; --overwrite replaces it")
    return directory

"""Writes token rows as the datasets library's save_to_disk does; data/formats/arrow_dataset.py describes the layout."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from trainyard.core.atomic_files import fsync_directory, replace_directory
from trainyard.core.errors import UserError
from trainyard.data.formats.arrow_dataset import INFO_FILE, STATE_FILE, IntArray

SHARD_BYTES = 500 << 20
"""Size at which a data file ends and the next begins: the limit of the datasets library."""


class ArrowDatasetWriter:
    """Fills a hidden directory next to `directory` and renames it when complete, replacing the old one."""

    def __init__(self, directory: Path, columns: dict[str, str], overwrite: bool = False) -> None:
        """`columns`: the dtype of each column."""
        self.directory = _check_target(directory, overwrite)
        self.columns = columns
        self.schema = pa.schema([(name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in columns.items()])
        self.fingerprint = hashlib.sha256(str(columns).encode())
        self.shard_paths: list[Path] = []
        self.file: Any = None
        self.stream: Any = None
        self.description = ""
        prefix = f".{self.directory.name}."
        self.temporary_directory = Path(tempfile.mkdtemp(dir=self.directory.parent, prefix=prefix, suffix=".part"))

    def add(self, batch: dict[str, IntArray]) -> None:
        """Append a record batch: for each column an array [rows, tokens]."""
        if self.stream is None:
            self.shard_paths.append(self.temporary_directory / f"part-{len(self.shard_paths):05d}")
            self.file = pa.OSFile(str(self.shard_paths[-1]), "wb")
            self.stream = pa.ipc.new_stream(self.file, self.schema)
        arrays = []
        for name, dtype in self.columns.items():
            values = np.ascontiguousarray(batch[name])
            assert values.dtype == dtype
            offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
            arrays.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1))))
            if name != "labels":  # labels follow from the other columns
                self.fingerprint.update(values.data)
        self.stream.write_batch(pa.record_batch(arrays, schema=self.schema))
        if self.file.tell() >= SHARD_BYTES:
            self._close_shard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self.stream is not None:
                self._close_shard()
            if kind is None:
                self._commit()
        finally:
            shutil.rmtree(self.temporary_directory, ignore_errors=True)

    def _close_shard(self) -> None:
        self.stream.close()
        self.file.close()
        self.stream = None

    def _commit(self) -> None:
        count = len(self.shard_paths)
        names = [f"data-{index:05d}-of-{count:05d}.arrow" for index in range(count)]
        for path, name in zip(self.shard_paths, names, strict=True):
            path.rename(self.temporary_directory / name)
        # "Sequence" is the older of the library's two names for lists; all of its versions read it.
        features = {
            name: {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "Sequence"}
            for name, dtype in self.columns.items()
        }
        info = {"citation": "", "description": self.description, "features": features, "homepage": "", "license": ""}
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": self.fingerprint.hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        for name, content in ((INFO_FILE, info), (STATE_FILE, state)):
            (self.temporary_directory / name).write_text(json.dumps(content, indent=2))
        for name in (*names, INFO_FILE, STATE_FILE):
            with (self.temporary_directory / name).open("rb") as file:
                os.fsync(file.fileno())
        self.temporary_directory.chmod(0o755)
        fsync_directory(self.temporary_directory)
        replace_directory(self.temporary_directory, self.directory)


def _check_target(directory: Path, overwrite: bool) -> Path:
    """The absolute path to write to. Replaces only an empty directory or one saved by this kind of writer."""
    directory = directory.expanduser().resolve()
    if not directory.parent.is_dir() or not os.access(directory.parent, os.W_OK):
        raise UserError(f"{directory}: {directory.parent} is not a writable directory")
    if directory.exists():
        if not directory.is_dir() or (any(directory.iterdir()) and not (directory / STATE_FILE).is_file()):
            raise UserError(f"{directory}: exists and is not a saved dataset; choose another name")
        if any(directory.iterdir()) and not overwrite:
            raise UserError(f"{directory}: already exists; --overwrite replaces it")
    return directory

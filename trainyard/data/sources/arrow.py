"""Packed blocks in directories of the datasets library (data/formats/arrow_dataset.py)."""

from typing import TYPE_CHECKING

from trainyard.data.source import DataSource

if TYPE_CHECKING:
    from pathlib import Path

    from trainyard.config.data_schema import DataSection
    from trainyard.config.schema import Config
    from trainyard.data.loading.dataset import Dataset
    from trainyard.remote.chunks.remote_path import DataPath, RemoteFiles


class ArrowSource(DataSource):
    has_fixed_length = is_countable = True
    inspector = "trainyard.prepare.inspect:inspect_arrow"

    def open(
        self, config: "Config", paths: tuple[str, ...], remote: "RemoteFiles | None"
    ) -> "tuple[Dataset, Dataset | None]":
        from trainyard.data.formats.arrow_dataset import ArrowDataset
        from trainyard.data.loading.data_files import match_files

        data, directories = config.data, match_files(paths, directories=True, remote=remote)
        return ArrowDataset(directories, data.seq_len, data.document_mask, config.model.vocab), None

    def vocab_size(self, data: "DataSection", remote: "RemoteFiles | None") -> int:
        """The largest token id plus 1: all are read."""
        from trainyard.data.formats.arrow_dataset import ArrowDataset
        from trainyard.data.loading.data_files import match_files

        directories = match_files(data.paths, directories=True, remote=remote)
        packed = ArrowDataset(directories, data.seq_len)
        return 1 + max(int(arrays["input_ids"].max()) for arrays in packed.batch_arrays)

    def files(self, data: "DataSection", remote: "RemoteFiles | None") -> "list[DataPath]":
        from trainyard.data.formats.arrow_dataset import data_files
        from trainyard.data.formats.documents import arrow_files
        from trainyard.data.loading.data_files import expand_directories, match_files
        from trainyard.remote.chunks.remote_path import RemotePath

        paths = match_files(data.paths, directories=True, remote=remote)
        # The names of remote files are in a file of the directory, which then needs no listing.
        return expand_directories(
            paths, lambda path: data_files(path) if isinstance(path, RemotePath) else arrow_files(path)
        )

    def recognizes(self, path: "Path") -> bool:
        from trainyard.data.formats.arrow_dataset import METADATA_FILES

        return path.is_dir() and any((path / name).is_file() for name in METADATA_FILES)


SOURCE = ArrowSource()

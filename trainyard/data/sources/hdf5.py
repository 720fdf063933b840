"""Masked sentence pairs for BERT in HDF5 files (data/formats/bert_hdf5.py)."""

from typing import TYPE_CHECKING

from trainyard.core.errors import UserError
from trainyard.data.source import DataSource

if TYPE_CHECKING:
    from pathlib import Path

    from trainyard.config.data_schema import DataSection
    from trainyard.config.schema import Config
    from trainyard.data.loading.dataset import Dataset
    from trainyard.remote.chunks.remote_path import RemoteFiles

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
UINT16_VOCAB = 1 << 16


class Hdf5Source(DataSource):
    has_fixed_length = is_countable = True
    losses = ("bert_pretraining",)
    unpacked_size = 4
    inspector = "trainyard.prepare.inspect:inspect_hdf5"

    def open(
        self, config: "Config", paths: tuple[str, ...], remote: "RemoteFiles | None"
    ) -> "tuple[Dataset, Dataset | None]":
        from trainyard.data.formats.bert_hdf5_remote import open_bert_hdf5
        from trainyard.data.loading.data_files import match_files

        data, vocab = config.data, config.model.vocab
        pairs = open_bert_hdf5(match_files(paths, remote=remote), data.seq_len, data.max_predictions, vocab)
        if pairs.vocab_size > vocab:
            raise UserError(
                f"{', '.join(paths)}: contains token {pairs.vocab_size - 1}, but model.vocab={vocab}; the "
                "samples were made with another vocabulary, or model.vocab is too small"
            )
        return pairs, None

    def vocab_size(self, data: "DataSection", remote: "RemoteFiles | None") -> int:
        """The largest token id plus 1: all are read."""
        from trainyard.data.formats.bert_hdf5_remote import open_bert_hdf5
        from trainyard.data.loading.data_files import match_files

        files = match_files(data.paths, remote=remote)
        return open_bert_hdf5(files, data.seq_len, data.max_predictions, UINT16_VOCAB).vocab_size

    def recognizes(self, path: "Path") -> bool:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(HDF5_MAGIC)) == HDF5_MAGIC


SOURCE = Hdf5Source()

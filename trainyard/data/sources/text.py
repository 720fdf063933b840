"""Text files that are tokenized in memory; without files, a small built-in text."""

from typing import TYPE_CHECKING

from trainyard.data.source import DataSource

if TYPE_CHECKING:
    from trainyard.config.data_schema import DataSection
    from trainyard.config.schema import Config
    from trainyard.data.loading.dataset import Dataset
    from trainyard.remote.chunks.remote_path import DataPath, RemoteFiles


class TextSource(DataSource):
    needs_paths = False
    marks_documents = makes_tokens = True

    def open(
        self, config: "Config", paths: tuple[str, ...], remote: "RemoteFiles | None"
    ) -> "tuple[Dataset, Dataset | None]":
        from trainyard.data.loading.text_stream import read_text
        from trainyard.data.loading.token_samples import TokenSamples

        data = config.data
        stream = read_text(data, config.model, paths, remote)
        return TokenSamples(stream, data.seq_len, config.model.vocab, data.document_mask, data.mask_eod_loss), None

    def vocab_size(self, data: "DataSection", remote: "RemoteFiles | None") -> int:
        """The tokenizer's."""
        from trainyard.data.loading.text_stream import tokenizer_spec
        from trainyard.data.text.tokenizer import load_tokenizer

        return load_tokenizer(tokenizer_spec(data, ())).vocab_size

    def files(self, data: "DataSection", remote: "RemoteFiles | None") -> "list[DataPath]":
        from trainyard.data.formats.documents import arrow_files
        from trainyard.data.loading.data_files import expand_directories, match_files, tokenizer_files

        paths = match_files(data.paths, directories=True, remote=remote)
        return [*expand_directories(paths, arrow_files), *tokenizer_files(data)]


SOURCE = TextSource()

"""Token files of Megatron (.bin and .idx), in any order that Megatron has or had."""

from typing import TYPE_CHECKING

from trainyard.data.source import DataSource

if TYPE_CHECKING:
    from pathlib import Path

    from trainyard.config.data_schema import DataSection
    from trainyard.config.schema import Config
    from trainyard.data.loading.dataset import Dataset
    from trainyard.remote.chunks.remote_path import DataPath, RemoteFiles


class TokensSource(DataSource):
    has_document_order = marks_documents = is_countable = True
    inspector = "trainyard.prepare.inspect:inspect_tokens"

    def open(
        self, config: "Config", paths: tuple[str, ...], remote: "RemoteFiles | None"
    ) -> "tuple[Dataset, Dataset | None]":
        from trainyard.data.loading.token_files import open_token_files

        return open_token_files(config.data, config.model.vocab, paths, remote)

    def open_in_order(self, config: "Config", remote: "RemoteFiles | None") -> "tuple[Dataset, Dataset | None]":
        from trainyard.data.loading.token_files import open_in_megatron_order

        return open_in_megatron_order(config.data, config.model.vocab, config.train, remote)

    def vocab_size(self, data: "DataSection", remote: "RemoteFiles | None") -> int:
        from trainyard.data.loading.token_files import largest_token

        return largest_token(data.paths, remote) + 1

    def files(self, data: "DataSection", remote: "RemoteFiles | None") -> "list[DataPath]":
        from trainyard.data.loading.data_files import token_prefixes

        prefixes = token_prefixes(data.paths, remote)
        return [prefix.with_name(prefix.name + suffix) for prefix in prefixes for suffix in (".bin", ".idx")]

    def recognizes(self, path: "Path") -> bool:
        from trainyard.data.formats.megatron_bin import is_token_file

        return is_token_file(path)


SOURCE = TokensSource()

"""The files that data.paths names, on this host or behind URLs."""

from collections.abc import Callable, Sequence
from pathlib import Path

from trainyard.config.data_schema import DataSection
from trainyard.core.constants import GIB
from trainyard.core.errors import UserError
from trainyard.core.user_cache import user_cache
from trainyard.data.formats.documents import match_paths
from trainyard.data.loading.user_dataset import find_source
from trainyard.data.text.tokenizer import TOKENIZER_FILES
from trainyard.remote.chunks.chunk_cache import open_cache
from trainyard.remote.chunks.remote_path import DataPath, RemoteFiles, RemotePath
from trainyard.remote.location import has_urls, is_url

_remote_files: dict[str, RemoteFiles] = {}


def remote_files(data: DataSection, refresh: bool = False) -> RemoteFiles | None:
    """The objects behind the URLs of data.paths; None if it has none.

    Fingerprints are those of the versions that the run reads, so both share what was listed until `refresh`.
    """
    if not has_urls(data.paths) or not (source := find_source(data)).reads_files:
        return None
    key = data.model_dump_json()
    if refresh or key not in _remote_files:
        directory = Path(data.cache.directory) if data.cache.directory else default_directory()
        remote = RemoteFiles(open_cache(directory, int(data.cache.gib * GIB)))
        files = [path for path in source.files(data, remote) if isinstance(path, RemotePath)]
        total = sum(path.stat().st_size for path in files)
        remote.set_chunk_size(total * source.unpacked_size)
        _remote_files[key] = remote
    return _remote_files[key]


def default_directory() -> Path:
    return user_cache("data", is_writable=True)


def files_read(data: DataSection, refresh: bool = False) -> list[DataPath]:
    """Every file that decides about the samples."""
    return find_source(data).files(data, remote_files(data, refresh))


def expand_directories(
    paths: Sequence[DataPath], list_files: Callable[[DataPath], Sequence[DataPath]]
) -> list[DataPath]:
    """Paths of files, with the files of each directory in its place."""
    return [file for path in paths for file in (list_files(path) if path.is_dir() else [path])]


def tokenizer_files(data: DataSection) -> list[Path]:
    """The local files of data.tokenizer."""
    named = [Path(name).expanduser() for name in (data.tokenizer, data.vocab_file, data.merges_file) if name]
    in_directories = [path / name for path in named for name in TOKENIZER_FILES]
    return [path for path in named + in_directories if path.is_file()]


def match(pattern: str, remote: RemoteFiles | None) -> Sequence[DataPath]:
    if remote is None or not is_url(pattern):
        return match_paths(pattern.removeprefix("file://"))
    return remote.match(pattern)


def token_prefixes(paths: Sequence[str], remote: RemoteFiles | None = None) -> list[DataPath]:
    """PREFIX of each PREFIX.bin and PREFIX.idx, from names with or without the suffix, or globs of them."""
    prefixes: list[DataPath] = []
    for pattern in paths:
        name = pattern.removesuffix(".idx").removesuffix(".bin")
        matches = match(f"{name}.idx", remote)
        if not matches:
            raise UserError(f"data.paths={pattern}: no such token files ({name}.bin and {name}.idx)")
        prefixes += [found.with_suffix("") for found in matches]
    return prefixes


def match_files(paths: Sequence[str], directories: bool = False, remote: RemoteFiles | None = None) -> list[DataPath]:
    files: list[DataPath] = []
    for pattern in paths:
        matches = [path for path in match(pattern, remote) if path.is_file() or (directories and path.is_dir())]
        if not matches:
            if is_url(pattern):
                raise UserError(f"data.paths={pattern}: no such object, nor any below that name")
            raise UserError(f"data.paths={pattern}: no such file; without data.paths, a run reads a built-in text")
        files += matches
    return files

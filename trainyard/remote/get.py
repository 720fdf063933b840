"""`trainyard get`: any source to a path that the user chooses."""

import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.remote import fetch
from trainyard.remote.archive import ARCHIVE_SUFFIXES, RefusedArchive, is_archive, unpack
from trainyard.remote.credentials import redact
from trainyard.remote.location import find_model_location, is_url, is_web_url, parse_hub_location
from trainyard.remote.manifest import MANIFEST_FILE
from trainyard.remote.model_files import Wanted, needed_files
from trainyard.remote.sources.hub import list_repository, select_paths
from trainyard.remote.sources.remote_file import Checksum, RangeReader, RemoteFile
from trainyard.remote.sources.stored_files import is_one_file, list_stored_files
from trainyard.remote.sources.web import probe

SIZE_LIMIT_S = 8.0
"""Seconds to wait for sources that are only asked for the size of what they have."""
DEFAULT_MAX_SIZE = 2**40
"""Most bytes that an archive may unpack to."""


@dataclass(frozen=True)
class GetOptions:
    sha256: str | None = None
    unpack: bool = False
    max_size: int = DEFAULT_MAX_SIZE
    all_files: bool = False
    """Of a model on the Hub: all files instead of config.json, tokenizer and one format of weights."""
    include: tuple[str, ...] = ()
    """Globs of paths to download."""


@dataclass(frozen=True)
class Listing:
    label: str
    files: Sequence[RemoteFile]
    is_directory: bool
    """True if the source stands for a directory, even of one file."""

    @property
    def size(self) -> int | None:
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)


def list_source(sources: Sequence[str], options: GetOptions) -> Listing:
    """What is at the sources. Several sources are put into one directory."""
    listings = [_list_one(source, options) for source in sources]
    files = [file for listing in listings for file in listing.files]
    if options.include:
        files = [file for file in files if any(fnmatchcase(file.name, pattern) for pattern in options.include)]
        if not files:
            raise UserError(f"--include {' '.join(options.include)}: matches no file of {listings[0].label}")
    if options.sha256:
        if len(files) != 1:
            raise UserError(f"--sha256: {listings[0].label} has {counted(len(files), 'file')}; give it for one")
        files = [replace(files[0], reader=_CheckedReader(files[0].reader, options.sha256))]
    names = [file.name for file in files]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{repeated}: two sources have a file of this name")
    return Listing(listings[0].label, files, len(listings) > 1 or listings[0].is_directory)


def _list_one(source: str, options: GetOptions) -> Listing:
    label = redact(source)
    if location := parse_hub_location(source) or find_model_location(source):
        listing = list_repository(location)
        paths = select_paths(location, [file.path for file in listing.files])
        if location.kind == "model" and not (location.path or options.all_files or options.include):
            by_path = {file.name: file for file in listing.remote_files(paths)}
            paths = needed_files(Wanted.WEIGHTS, paths, lambda path: by_path[path].content(), str(location))
        files = listing.remote_files(paths)
        if paths == [location.path]:
            return Listing(label, [replace(file, name=Path(file.name).name) for file in files], False)
        return Listing(label, files, True)
    if is_web_url(source):
        return Listing(label, [probe(source)], False)
    if is_url(source):
        files = list_stored_files(source)
        data_files = [file for file in files if file.name != MANIFEST_FILE]
        return Listing(label, data_files, not is_one_file(files, source))
    raise UserError(f"{label}: neither a URL, nor OWNER/NAME on the Hub, nor a name of `trainyard get --list`")


def ask_sizes(sources: Mapping[str, Sequence[str]], limit_s: float = SIZE_LIMIT_S) -> dict[str, int]:
    """The bytes at the sources, by name, as far as they answer within the limit."""
    sizes: dict[str, int] = {}

    def ask(name: str) -> None:
        with suppress(UserError):
            if size := list_source(sources[name], GetOptions()).size:
                sizes[name] = size

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in sources]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    return dict(sizes)


class _CheckedReader:
    """A reader with the checksum that the user gave."""

    def __init__(self, reader: RangeReader, sha256: str) -> None:
        if not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
            raise UserError(f"--sha256 {sha256}: expected 64 hexadecimal digits")
        self.read, self._checksum = reader.read, Checksum("sha256", sha256.lower())

    def checksum(self) -> Checksum:
        return self._checksum


def choose_target(listing: Listing, destination: str | None, options: GetOptions) -> Path:
    """The path that the download creates: DEST itself, or in it if it is a directory and the source one file."""
    single = not listing.is_directory and not options.unpack
    name = listing.files[0].name if not listing.is_directory else _directory_name(listing.label)
    if options.unpack and not listing.is_directory:
        name = re.sub(r"(\.tar)?\.[^.]+$", "", name) or name
    if destination is None:
        return Path(name).absolute()
    path = Path(destination).expanduser()
    if single and (destination.endswith("/") or path.is_dir()):
        return (path / name).absolute()
    return path.absolute()


def _directory_name(label: str) -> str:
    location = parse_hub_location(label) or find_model_location(label)
    return (location.repo if location else label.rstrip("/")).rpartition("/")[2]


def get(
    sources: Sequence[str],
    listing: Listing,
    target: Path,
    options: GetOptions,
    on_bytes: fetch.OnBytes,
    streams: int = fetch.NUM_STREAMS,
) -> int:
    """Download what `listing` says is at the sources; returns the number of files. An existing target is replaced."""
    if options.unpack and (len(listing.files) != 1 or not is_archive(listing.files[0].name)):
        raise UserError(f"--unpack: {listing.label} is not one file of {', '.join(ARCHIVE_SUFFIXES)}")
    latest, count = [listing], 0

    def list_files() -> Sequence[RemoteFile]:
        latest.append(latest[0] if len(latest) == 1 else list_source(sources, options))
        return latest[-1].files

    def finish(directory: Path) -> Path:
        nonlocal count
        files = [path for path in directory.rglob("*") if path.is_file()]
        count = len(files)
        if not options.unpack:
            return directory if latest[-1].is_directory else files[0]
        unpacked = directory.parent / "unpacked"
        shutil.rmtree(unpacked, ignore_errors=True)
        try:
            count = unpack(files[0], unpacked, options.max_size, listing.label)
        except RefusedArchive:
            files[0].unlink()
            raise
        finally:
            if not count:
                shutil.rmtree(unpacked, ignore_errors=True)
        return unpacked

    fetch.download(list_files, target, on_bytes, finish, streams, replace=True)
    return count


def check_existing(listing: Listing, target: Path) -> None:
    """Raise UserError unless `target` is what the download would create: sizes, and checksums that the source has."""
    for file in listing.files:
        path = target / file.name if listing.is_directory else target
        if not path.is_file():
            raise UserError(f"{target}: already exists, without {file.name}; --overwrite replaces it")
        if file.size is not None and path.stat().st_size != file.size:
            raise UserError(f"{target}: already exists, and {path.name} has another size; --overwrite replaces it")
        if (checksum := file.reader.checksum()) and not checksum.matches(path):
            raise UserError(f"{target}: already exists, and {path.name} differs; --overwrite replaces it")

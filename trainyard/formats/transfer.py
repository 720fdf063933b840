"""Checkpoints behind URLs: local copies for conversions, and what of a run is uploaded.

All formats are read from and written to local files. A source in a store is downloaded, except for native checkpoints,
which are read in place. Models of the Hub and the web are in their caches. A target at a URL is written to a temporary
directory first and then uploaded; the file that makes a checkpoint complete comes last.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from trainyard.checkpoint.checkpoint import latest_checkpoint
from trainyard.checkpoint.file_names import COMMIT_FILE, STEP_DIRECTORY
from trainyard.core.disk_space import check_space
from trainyard.core.errors import UserError, one_line
from trainyard.formats.hf import is_hf
from trainyard.formats.registry import detect_format, verify_checksums
from trainyard.remote.fetch import OnBytes, download
from trainyard.remote.local_copies import is_remote_model, local_weights
from trainyard.remote.location import is_url
from trainyard.remote.manifest import MANIFEST_FILE
from trainyard.remote.sources.stored_files import is_one_file, list_stored_files
from trainyard.remote.storage import FsspecStorage, open_storage
from trainyard.remote.store_upload import upload_directory

FINAL_FILES = ("config.json", "model.safetensors.index.json", ".metadata", "done", "complete.json")
"""Files that readers look for first. They are uploaded last, in this order."""
SKIPPED_NAMES = (".lock", "lock")
SKIPPED_SUFFIXES = (".part", ".tmp")


@contextmanager
def local_source(source: str, on_bytes: OnBytes) -> Iterator[str | Path]:
    """Yield where to read a checkpoint from: its local path, a temporary copy, or the URL of a native checkpoint."""
    if not is_url(source) or is_remote_model(source):
        path = local_weights(source, on_bytes)
        if detect_format(path):  # otherwise it may be any directory, such as the root of a disk
            check_links(path)
        yield path
        return
    storage = open_storage(source)
    assert isinstance(storage, FsspecStorage)
    if latest_checkpoint(storage):
        yield source
        return
    with TemporaryDirectory(prefix="trainyard-") as temporary:
        copy = Path(temporary) / (PurePosixPath(storage.path).name or "checkpoint")
        files = list_stored_files(source)
        is_file = is_one_file(files, source)
        try:
            check_space(copy, sum(file.size or 0 for file in files), source)
        except UserError as error:
            raise UserError(f"{error}; set TMPDIR, or name the directory of one checkpoint") from None
        download(lambda: list_stored_files(source), copy, on_bytes, lambda path: path / copy.name if is_file else path)
        yield copy


@contextmanager
def local_target(target: str, on_bytes: OnBytes) -> Iterator[Path]:
    """Yield the path of a new directory. If `target` is a URL, the directory is uploaded after the block."""
    if not is_url(target):
        yield Path(target.removeprefix("file://"))
        return
    storage = _writable_storage(target)
    with TemporaryDirectory(prefix="trainyard-") as temporary:
        directory = Path(temporary) / (PurePosixPath(storage.path).name or "checkpoint")
        yield directory
        upload_directory(directory, storage, FINAL_FILES, on_bytes)


def check_new_target(target: str) -> None:
    """Refuse a target that exists and is not empty. Nothing is created."""
    path = Path(target.removeprefix("file://")).expanduser()
    exists = bool(open_storage(target).listdir()) or (not is_url(target) and path.is_file())
    if exists:
        raise UserError(f"{target}: already exists and is not empty; choose a new directory")


def files_to_upload(source: Path) -> dict[str, Path]:
    """The files of a run or checkpoint by relative name, after a comparison with the checksums that its checkpoints and
    exported models have. Checkpoints that are not complete are left out."""
    if source.is_file():
        return {source.name: source}
    check_links(source)
    incomplete = [
        path
        for path in (source, *source.rglob("*"))
        if path.is_dir() and STEP_DIRECTORY.fullmatch(path.name) and not (path / COMMIT_FILE).is_file()
    ]
    files = {
        str(path.relative_to(source)): path
        for path in sorted(source.rglob("*"))
        if path.is_file()
        and path.name not in SKIPPED_NAMES
        and not path.name.endswith(SKIPPED_SUFFIXES)
        and path.name != MANIFEST_FILE
        and not any(path.is_relative_to(directory) for directory in incomplete)
    }
    if not files:
        raise UserError(f"{source}: no such run or checkpoint, or it has no files")
    for directory in sorted({path.parent for path in files.values()}):
        if (directory / COMMIT_FILE).is_file() or is_hf(directory):
            verify_checksums(directory)  # the manifest must not vouch for a file that is damaged already
    return files


def check_links(source: Path) -> None:
    """Refuse symbolic links in a directory that lead out of it, except those of the Hugging Face cache to its blobs."""
    root = source.resolve()
    for directory, subdirectories, files in os.walk(root):  # does not follow links to directories
        for name in (*subdirectories, *files):
            check_link(Path(directory, name), root)


def check_link(path: Path, root: Path) -> None:
    """Refuse `path` if it is a symbolic link that leads out of `root`."""
    if not path.is_symlink():
        return
    try:
        target, root = path.resolve(), root.resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path}: not a readable link: {one_line(error)}") from None
    allowed = [root, *(parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")]
    if not any(target.is_relative_to(directory) for directory in allowed):
        raise UserError(f"{path}: a link to {target}, outside the checkpoint; nearest: a copy in its place")


def _writable_storage(target: str) -> FsspecStorage:
    """The empty storage at a URL, after a test file was written and removed."""
    storage = open_storage(target)
    assert isinstance(storage, FsspecStorage)
    check_new_target(target)
    try:
        storage.mkdir()
        with storage.write(".trainyard") as file:
            file.write(b"\n")
        storage.remove(".trainyard")
    except Exception as error:
        raise UserError(f"{target}: cannot be written: {one_line(error)}") from None
    return storage

"""Uploads a run or checkpoint as it is to an object store, with a manifest of sizes and hashes.

The manifest is the first file, with the names of all files and the mark that the upload is not complete, and the last,
with their hashes. So a reader can tell half an upload from a directory that others wrote.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from trainyard.checkpoint.formats.hf import is_hf
from trainyard.checkpoint.io.storage import FsspecStorage, open_storage
from trainyard.checkpoint.native.file_names import COMMIT_FILE, STEP_DIRECTORY
from trainyard.checkpoint.registry import verify_checksums
from trainyard.checkpoint.transfer import COPY_CHUNK_BYTES, FINAL_FILES, OnBytes, check_links, copy_all
from trainyard.core.errors import UserError, one_line
from trainyard.remote.credentials import redact
from trainyard.remote.sources.object_store import MANIFEST_FILE, read_manifest

SKIPPED_NAMES = (".lock", "lock")
SKIPPED_SUFFIXES = (".part", ".tmp")


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


def upload_files(files: dict[str, Path], target: str, overwrite: bool, on_bytes: OnBytes) -> int:
    """Upload files and then their manifest; returns the bytes."""
    storage = open_storage(target)
    if not isinstance(storage, FsspecStorage):
        raise UserError(f"{target}: expected hf://OWNER/NAME or a URL such as s3://bucket/name")
    present = _present(storage)
    manifest = read_manifest(storage.filesystem, storage.path, redact(target)) if MANIFEST_FILE in present else None
    stale = present - files.keys() - {MANIFEST_FILE}
    begun = set(manifest.files) if manifest and not manifest.is_complete else set()  # by an upload that did not finish
    if not overwrite and (stale - begun or (manifest and manifest.is_complete)):
        raise UserError(f"{redact(target)}: already exists and is not empty; --overwrite replaces it")
    entries: dict[str, dict[str, object]] = {}

    def send(name: str, report: Callable[[int], None]) -> None:
        digest, size = hashlib.sha256(), 0
        directory, _, base = name.rpartition("/")
        parent = storage / directory if directory else storage
        parent.mkdir()
        with files[name].open("rb") as source, parent.write(base) as remote:
            while data := source.read(COPY_CHUNK_BYTES):
                remote.write(data)
                digest.update(data)
                size += len(data)
                report(len(data))
        entries[name] = {"size": size, "sha256": digest.hexdigest()}

    def write_manifest(entries: dict[str, dict[str, object]], is_complete: bool) -> None:
        with storage.write(MANIFEST_FILE) as file:
            file.write(json.dumps({"complete": is_complete, "files": dict(sorted(entries.items()))}, indent=1).encode())

    sizes = {name: path.stat().st_size for name, path in files.items()}
    final = sorted((name for name in sizes if _final_rank(name) is not None), key=lambda name: _final_rank(name) or 0)
    try:
        storage.mkdir()
        write_manifest({name: {"size": size} for name, size in sizes.items()}, is_complete=False)
        for name in (*reversed(final), *sorted(stale)):  # readers must not see old and new files mixed
            if name in present:
                storage.remove(name)
        done = copy_all({name: size for name, size in sizes.items() if name not in final}, send, on_bytes)
        for name in final:
            done = copy_all({name: sizes[name]}, send, on_bytes, done)
        write_manifest(entries, is_complete=True)
    except UserError:
        raise
    except Exception as error:
        problem = f"cannot be written: {redact(one_line(error))}"
        raise UserError(f"{redact(target)}: {problem}; it is not complete; run the command again") from None
    return done


def _present(storage: FsspecStorage) -> set[str]:
    """Names of all files in the store below the target."""
    storage.filesystem.invalidate_cache()
    try:
        found = storage.filesystem.find(storage.path)
    except FileNotFoundError:
        return set()
    except Exception as error:
        raise UserError(f"{storage}: cannot be read: {redact(one_line(error))}") from None
    root = storage.path.strip("/")
    return {path.strip("/").removeprefix(root).strip("/") for path in found}


def _final_rank(name: str) -> int | None:
    base = name.rpartition("/")[2]
    return FINAL_FILES.index(base) if base in FINAL_FILES else None

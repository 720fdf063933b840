"""Files of the Hub in the cache of huggingface_hub, which other programs share.

Content is downloaded and checked under its final name in `blobs/`; huggingface_hub then links the files of the commit
to it. On each host one process downloads at a time. In a job of many ranks, a rank that follows another one within
FRESH_S takes what the cache has, without asking the Hub again.
"""

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import UserError, one_line
from trainyard.core.world import World
from trainyard.remote.fetch import OnBytes, download, ignore_bytes
from trainyard.remote.location import COMMIT_HASH, HubLocation
from trainyard.remote.model_files import Wanted, needed_files
from trainyard.remote.sources.hub import HubListing, list_repository, quiet_client, select_paths, translate_error
from trainyard.remote.sources.retry import SourceUnavailable

FRESH_S = 600.0
MAX_HTTP_BYTES = 50 * 10**9
"""Larger files are available only through huggingface_hub's own protocol."""
logger = logging.getLogger(__name__)

Choose = Callable[[list[str], Callable[[str], bytes]], list[str]]
"""Chooses among the files of a repository, given a function that reads one of them."""


def cached_model(location: HubLocation, wanted: Wanted, on_bytes: OnBytes = ignore_bytes) -> Path:
    """The local directory with the wanted files of a model, or the file that the location names."""
    prefix = location.path.strip("/")

    def choose(paths: list[str], read: Callable[[str], bytes]) -> list[str]:
        if prefix in paths:
            return [prefix]
        start = f"{prefix}/" if prefix else ""
        inside = {path.removeprefix(start): path for path in paths if path.startswith(start)}
        if not inside:
            raise UserError(f"{location}: no such file or directory in the repository; has: {', '.join(paths[:6])}")
        names = needed_files(wanted, list(inside), lambda name: read(inside[name]), str(location))
        return [inside[name] for name in names]

    root = _snapshot(location, choose, on_bytes)[0]
    return root / prefix if prefix else root


def cached_paths(location: HubLocation, on_bytes: OnBytes = ignore_bytes) -> list[Path]:
    """The local files that a location names by a path or glob, sorted."""

    root, chosen = _snapshot(location, lambda paths, read: select_paths(location, paths), on_bytes)
    return [root / path for path in sorted(chosen)]


def _snapshot(location: HubLocation, choose: Choose, on_bytes: OnBytes) -> tuple[Path, list[str]]:
    """The directory of a commit in the cache, and the chosen paths, all of which are in it."""
    with _host_lock(location) as stamp:
        if _is_recent(stamp) and (found := _find_in_cache(location, choose)):
            return found
        try:
            found = _download(location, choose, on_bytes)
        except SourceUnavailable as error:
            if found := _find_in_cache(location, choose):
                logger.warning("%s; using the copy in the cache", error)
                return found
            raise SourceUnavailable(
                f"{error}, and {_cache_directory()} has no complete copy; connect to the Hub once, or set HF_HOME to a "
                "cache that has it"
            ) from None
        except OSError as error:
            raise UserError(f"{_cache_directory()}: cannot be written: {one_line(error)}; set HF_HOME") from None
        with suppress(OSError):  # a cache that cannot be written
            os.utime(stamp)
        return found


def _download(location: HubLocation, choose: Choose, on_bytes: OnBytes) -> tuple[Path, list[str]]:
    from huggingface_hub import snapshot_download

    folder = _cache_directory() / _folder_name(location)
    while True:
        listing = list_repository(location)

        def read(path: str, listing: HubListing = listing) -> bytes:
            _fetch_blobs(listing, [path], folder, ignore_bytes)
            return (folder / "blobs" / _blob(listing, path)).read_bytes()

        paths = choose([file.path for file in listing.files], read)
        _fetch_blobs(listing, paths, folder, on_bytes)
        try:
            with quiet_client():
                root = Path(
                    snapshot_download(
                        location.repo,
                        repo_type=location.kind,
                        revision=location.revision,
                        allow_patterns=[_escape(path) for path in paths],
                        library_name="trainyard",
                    )
                )
        except Exception as error:
            raise translate_error(error, location) from None
        if root.name == listing.commit:  # else the branch has moved
            with suppress(OSError):
                _record_listing(folder, listing)
            return root, paths


def _fetch_blobs(listing: HubListing, paths: list[str], folder: Path, on_bytes: OnBytes) -> None:
    """Download the content of files that the cache lacks."""
    by_path = {file.path: file for file in listing.files}
    missing = {
        by_path[path].blob: path
        for path in paths
        if not (folder / "blobs" / by_path[path].blob).exists() and by_path[path].size <= MAX_HTTP_BYTES
    }
    if not missing:
        return
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    target = folder / f"trainyard-{listing.commit[:12]}"
    files = listing.remote_files(list(missing.values()), lambda file: file.blob)
    logger.info("downloading %s: %.1f MiB", listing.location, sum(file.size or 0 for file in files) / 2**20)

    def move(directory: Path) -> None:
        for blob in missing:
            os.replace(directory / blob, folder / "blobs" / blob)

    download(lambda: files, target, on_bytes, move)


def _blob(listing: HubListing, path: str) -> str:
    return next(file.blob for file in listing.files if file.path == path)


def _find_in_cache(location: HubLocation, choose: Choose) -> tuple[Path, list[str]] | None:
    """The latest known commit of a revision, if the cache has all chosen files of it."""
    folder = _cache_directory() / _folder_name(location)
    revision = location.revision or "main"
    try:
        commit = revision if COMMIT_HASH.fullmatch(revision) else (folder / "refs" / revision).read_text().strip()
        root = folder / "snapshots" / commit
        present = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        record = _listing_record(folder, commit)
        if not record.exists() and location.kind == "dataset":
            return None  # nobody knows whether files are missing
        paths = json.loads(record.read_text()) if record.exists() else sorted(present)
        chosen = choose(paths, lambda path: (root / path).read_bytes())
        return (root, chosen) if present.issuperset(chosen) else None
    except (OSError, UserError, ValueError):
        return None


def _record_listing(folder: Path, listing: HubListing) -> None:
    """Keep the names of all files of a commit: they tell which ones the cache lacks when the Hub cannot be asked."""
    record = _listing_record(folder, listing.commit)
    if not record.exists():
        record.parent.mkdir(exist_ok=True)
        atomic_write_text(record, json.dumps([file.path for file in listing.files]))


def _listing_record(folder: Path, commit: str) -> Path:
    return folder / "trainyard" / f"{commit}.json"


def _cache_directory() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE).expanduser()


def _folder_name(location: HubLocation) -> str:
    """The directory of a repository in the cache."""
    from huggingface_hub.file_download import repo_folder_name

    return str(repo_folder_name(repo_id=location.repo, repo_type=location.kind))


@contextmanager
def _host_lock(location: HubLocation) -> Iterator[Path]:
    """Hold this host's lock on a repository in the cache. A cache that cannot be written needs none."""
    name = f"{_folder_name(location)}@{(location.revision or 'main').replace('/', '%2F')}"
    path = _cache_directory() / ".locks" / "trainyard" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if new:
            os.utime(path, (0, 0))
    except OSError:
        yield path
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            logger.debug("%s: no lock: %s", path, error)
        yield path
    finally:
        os.close(handle)


def _is_recent(stamp: Path) -> bool:
    """True in a job of several ranks, if another process has asked the Hub a short time ago."""
    try:
        return World.from_environment().size > 1 and time.time() - stamp.stat().st_mtime < FRESH_S
    except (OSError, UserError):
        return False


def _escape(path: str) -> str:
    """A glob that matches only `path`."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in path)

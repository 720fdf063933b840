"""Copies of files from object stores and the web, kept by URL and version.

    ROOT/HASH-OF-URL/HASH-OF-VERSIONS/      complete; older versions of the URL are removed

ROOT is TRAINYARD_DOWNLOADS, or trainyard/downloads in the user's cache directory.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from trainyard.core.errors import UserError
from trainyard.core.user_cache import user_cache
from trainyard.remote.fetch import OnBytes, download, ignore_bytes
from trainyard.remote.sources.remote_file import RemoteFile, SourceUnavailable

DIRECTORY_VARIABLE = "TRAINYARD_DOWNLOADS"
"""Environment variable: the directory of these copies."""
logger = logging.getLogger(__name__)


def cache_root() -> Path:
    if directory := os.environ.get(DIRECTORY_VARIABLE):
        return Path(directory).expanduser()
    return user_cache("downloads")


def cached_directory(
    url: str, list_files: Callable[[], Sequence[RemoteFile]], on_bytes: OnBytes = ignore_bytes
) -> Path:
    """The directory with the current version of the files at a URL. If the source does not answer, the last one."""
    parent = cache_root() / hashlib.sha256(url.encode()).hexdigest()[:20]
    try:
        files = list_files()
    except SourceUnavailable as error:
        copies = [path for path in parent.glob("*") if not path.name.startswith(".")]
        if not copies:
            raise
        logger.warning("%s; using the copy in the cache", error)
        return max(copies, key=lambda path: path.stat().st_mtime)
    versions = "\n".join(f"{file.name} {file.size} {file.version}" for file in files)
    target = parent / hashlib.sha256(versions.encode()).hexdigest()[:20]
    known = all(file.version is not None for file in files)
    if not target.is_dir() or not known:
        if target.is_dir():
            shutil.rmtree(target)
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{cache_root()}: cannot be written: {error.strerror}; set {DIRECTORY_VARIABLE}") from None
        logger.info("downloading %s: %.1f MiB", files[0].label, sum(file.size or 0 for file in files) / 2**20)
        download(lambda: files, target, on_bytes)
        for other in parent.iterdir():
            if other.name not in (target.name, f".{target.name}.part"):
                shutil.rmtree(other, ignore_errors=True)
    return target

"""Local copies of what a command is given: weights, tokenizers, configurations and data, wherever they are.

Every function returns a local path unchanged. A source is looked up once in a process, so that all its parts see the
same version. Files of the Hub are in the cache of huggingface_hub, others are kept by URL and version:

    ROOT/HASH-OF-URL/HASH-OF-VERSIONS/      complete; older versions of the URL are removed

ROOT is TRAINYARD_DOWNLOADS, or trainyard/downloads in the user's cache directory.
"""

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from trainyard.core.errors import UserError
from trainyard.core.user_cache import user_cache
from trainyard.remote import hub_cache
from trainyard.remote.fetch import OnBytes, download, ignore_bytes
from trainyard.remote.location import (
    FILE_SUFFIXES,
    find_model_location,
    is_url,
    is_web_url,
    parse_hub_location,
)
from trainyard.remote.model_files import (
    INDEX_SUFFIX,
    USUAL_TOKENIZER_FILES,
    WEIGHT_FILES,
    Wanted,
    needed_files,
    read_index,
)
from trainyard.remote.sources import hub
from trainyard.remote.sources.remote_file import RemoteFile
from trainyard.remote.sources.retry import SourceUnavailable
from trainyard.remote.sources.stored_files import is_one_file, list_stored_files
from trainyard.remote.sources.web import probe

DIRECTORY_VARIABLE = "TRAINYARD_DOWNLOADS"
"""Environment variable: the directory of copies from object stores and the web."""
logger = logging.getLogger(__name__)

_known: dict[tuple[str, Wanted], Path] = {}
_lock = threading.Lock()


def local_config(source: str | Path) -> Path:
    """The path of a config.json or of a directory with one."""
    return _local(str(source), Wanted.CONFIG, ignore_bytes)


def local_tokenizer(source: str | Path) -> Path:
    """The path of a tokenizer's file, or of a directory with its files."""
    return _local(str(source), Wanted.TOKENIZER, ignore_bytes)


def local_weights(source: str | Path, on_bytes: OnBytes = ignore_bytes) -> Path:
    """The path of weights with their configuration and tokenizer. Native checkpoints at URLs are read in place; this
    copies other formats."""
    return _local(str(source), Wanted.WEIGHTS, on_bytes)


def local_inputs(patterns: Sequence[str], on_bytes: OnBytes = ignore_bytes) -> list[str]:
    """Inputs of data commands: names and globs of local files are left as they are."""
    return [path for pattern in patterns for path in _local_input(pattern, on_bytes)]


def is_remote_model(source: str | Path) -> bool:
    """True if `source` names a model on the Hub or at a web URL, which must be copied to be read."""
    return find_model_location(str(source)) is not None or is_web_url(str(source))


def pin_revision(source: str) -> str:
    """The source with the commit that a branch of the Hub is now, so that all ranks read the same one. Without an
    answer from the Hub, the source itself."""
    location = find_model_location(source)
    if not location:
        return source
    try:
        return str(hub.resolve_commit(location))
    except SourceUnavailable:
        return source


def forget_sources() -> None:
    """Look sources up again that this process already knows."""
    _known.clear()


def _local(source: str, wanted: Wanted, on_bytes: OnBytes) -> Path:
    path = Path(source.removeprefix("file://")).expanduser()
    if not is_url(source) and path.exists():
        return path
    with _lock:
        if found := _known.get((source, wanted)) or _known.get((source, Wanted.WEIGHTS)):
            return found
        if location := find_model_location(source):
            try:
                found = hub_cache.cached_model(location, wanted, on_bytes)
            except UserError as error:
                if source.startswith("hf://") or is_url(source):
                    raise
                raise UserError(f"{source}: no such path here; as a name on the Hub: {error}") from None
        elif is_web_url(source):
            found = _from_web(source, wanted, on_bytes)
        elif is_url(source):
            found = _from_store(source, wanted, on_bytes)
        else:
            return path
        _known[source, wanted] = found
        return found


def _from_store(url: str, wanted: Wanted, on_bytes: OnBytes) -> Path:
    url = url.rstrip("/")

    def list_files() -> list[RemoteFile]:
        files = list_stored_files(url)
        by_name = {file.name: file for file in files}
        is_hf = any(name in by_name or name + INDEX_SUFFIX in by_name for name in WEIGHT_FILES)
        if is_one_file(files, url) or (wanted is Wanted.WEIGHTS and not is_hf):
            return files
        names = needed_files(wanted, list(by_name), lambda name: by_name[name].content(), url)
        return [by_name[name] for name in names]

    directory = cached_directory(f"{url} {wanted.value}", list_files, on_bytes)
    file = directory / url.rpartition("/")[2]
    return file if file.is_file() else directory


def _from_web(url: str, wanted: Wanted, on_bytes: OnBytes) -> Path:
    """A file at a web URL, or the files of a model with known names below it: web servers list no directories."""
    base = url.rstrip("/")
    if base.lower().endswith(FILE_SUFFIXES):
        beside = base.rpartition("/")[0]

        def list_file() -> list[RemoteFile]:
            optional = ("config.json", *USUAL_TOKENIZER_FILES) if wanted is Wanted.WEIGHTS else ()
            return [probe(base), *_existing(beside, optional)]

        directory = cached_directory(f"{base} {wanted.value}", list_file, on_bytes)
        return directory / base.rpartition("/")[2]

    def list_files() -> list[RemoteFile]:
        if wanted is Wanted.CONFIG:
            return [probe(f"{base}/config.json")]
        tokenizer = _existing(base, USUAL_TOKENIZER_FILES)
        if wanted is Wanted.TOKENIZER:
            if not tokenizer:
                raise UserError(f"{base}: has none of {', '.join(USUAL_TOKENIZER_FILES[:5])}")
            return tokenizer
        return [probe(f"{base}/config.json"), *tokenizer, *_web_weights(base)]

    return cached_directory(f"{base} {wanted.value}", list_files, on_bytes)


def _web_weights(base: str) -> list[RemoteFile]:
    for name in WEIGHT_FILES:
        if index := _existing(base, [name + INDEX_SUFFIX]):
            shards = read_index(index[0].content(), index[0].label)
            return [*index, *(probe(f"{base}/{shard}") for shard in sorted(shards))]
        if weights := _existing(base, [name]):
            return weights
    raise UserError(f"{base}: has neither {' nor '.join(WEIGHT_FILES)}")


def _existing(base: str, names: Sequence[str]) -> list[RemoteFile]:
    """Those files below a URL that exist."""
    found = []
    for name in names:
        try:
            found.append(probe(f"{base}/{name}"))
        except UserError as error:
            if "no such file" not in str(error):
                raise
    return found


def _local_input(pattern: str, on_bytes: OnBytes) -> list[str]:
    if not is_url(pattern):
        return [pattern]
    if location := parse_hub_location(pattern):
        return [str(path) for path in hub_cache.cached_paths(location, on_bytes)]

    def list_files() -> list[RemoteFile]:
        return [probe(pattern)] if is_web_url(pattern) else list_stored_files(pattern)

    directory = cached_directory(pattern, list_files, on_bytes)
    return [str(path) for path in sorted(directory.rglob("*")) if path.is_file()]


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

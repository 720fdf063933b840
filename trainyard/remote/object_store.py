"""The client of object stores: S3 and the others that fsspec knows, with the credentials of its environment.

Every method makes one attempt and raises the errors of the store's library. `fault_of` tells what they mean, the same
for all callers; `translate_error` makes the one line for the user, which depends on what was to be done.
"""

import re
from datetime import datetime
from enum import Enum, auto
from typing import Any, NamedTuple

from trainyard.core.errors import UserError, one_line
from trainyard.remote.credentials import redact
from trainyard.remote.sources.remote_file import SourceChanged
from trainyard.remote.sources.retry import TransferError

S3_PROTOCOLS = ("s3", "s3a")
CREDENTIAL_ERRORS = ("NoCredentialsError", "ProfileNotFound", "InvalidConfigError", "PartialCredentialsError")
"""Of botocore, which is not always installed."""
UNRETRIED_S3 = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 1}, "max_pool_connections": 32}
"""Settings of botocore without its own retries."""
VERSION_KEYS = ("ETag", "etag", "content_md5", "md5Hash", "sha256", "blob_id", "oid", "generation", "Last-Modified")
"""Entries of fsspec's `info` that change with the contents, the best first."""
TIME_KEYS = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
GLOB_CHARACTERS = "*?["
HUB_COMMIT = re.compile(r"@[0-9a-f]{40}/")


class StoredObject(NamedTuple):
    url: str
    path: str
    """Path in its file system."""
    size: int
    version: str
    """ETag, or what the store has instead; empty if it has nothing."""


class Fault(Enum):
    """What the error of a store means for the object that was asked for."""

    MISSING = auto()
    CHANGED = auto()
    DENIED = auto()
    NO_CREDENTIALS = auto()
    REFUSED = auto()
    PASSING = auto()
    """Another attempt may succeed."""


Messages = dict[Fault, str]
"""What to tell the user of each fault, with {} for the reason. Faults without a message count as passing."""


class ObjectStore:
    """The objects of a bucket or host."""

    def __init__(self, url: str, is_retried: bool = False, **options: Any) -> None:
        """`is_retried`: the caller repeats requests, so the retries of S3's library, which would multiply with them,
        are off."""
        import fsspec

        self.protocol = url.partition("://")[0]
        self.is_s3 = self.protocol in S3_PROTOCOLS
        self.is_http = self.protocol in ("http", "https")
        if self.is_s3 and is_retried:
            configured = fsspec.config.conf.get(self.protocol, {}).get("config_kwargs", {})
            options["config_kwargs"] = {**UNRETRIED_S3, **configured}
        try:
            self.filesystem, path = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            fix = "pip install 'trainyard[s3]'" if self.is_s3 else one_line(error)
            raise UserError(f"{redact(url)}: {self.protocol}:// needs a package that is not installed: {fix}") from None
        except ValueError as error:
            raise UserError(f"{redact(url)}: {redact(one_line(error))}") from None
        self.path: str = path.rstrip("/")
        """The path of `url` in the file system."""

    def info(self, path: str) -> dict[str, Any] | None:
        """What the store has at a path now; None if there is nothing."""
        self.filesystem.invalidate_cache()
        try:
            return dict(self.filesystem.info(path))
        except FileNotFoundError as error:
            status = http_status(error)
            if status in (401, 403):  # fsspec's HTTP calls every failure FileNotFoundError
                raise PermissionError(f"HTTP status {status}") from None
            if status and (status == 429 or status >= 500):
                raise OSError(f"HTTP status {status}") from None
            if self.is_http and status is None and error.__cause__ is not None:
                raise OSError(one_line(error.__cause__)) from None
            return None

    def list_files(self, path: str) -> dict[str, dict[str, Any]]:
        """Paths and infos of all files below a path, or of those that match a glob; empty if there are none."""
        self.filesystem.invalidate_cache()
        find = self.filesystem.glob if has_glob(path) else self.filesystem.find
        try:
            found: dict[str, dict[str, Any]] = find(path, detail=True)
        except FileNotFoundError:
            return {}
        return {name: info for name, info in found.items() if info["type"] == "file" and not name.endswith("/")}

    def stored(self, url: str, info: dict[str, Any]) -> StoredObject:
        """The object that `info` describes, in its present version."""
        version = next((info[key] for key in (*VERSION_KEYS, *TIME_KEYS) if info.get(key)), "")
        if isinstance(version, datetime):  # some file systems list a number and tell a date
            version = version.timestamp()
        if info.get("size") is None:
            raise UserError(f"{url}: the server does not tell its size; copy the file to this host")
        return StoredObject(url, str(info["name"]), int(info["size"]), str(version))

    def read(self, stored: StoredObject, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` (exclusive) of this version of an object. Raises SourceChanged for any other."""
        data, is_checked = self._get(stored, start, stop)
        if len(data) != stop - start:
            if len(data) == stored.size:
                raise UserError(f"{stored.url}: the server ignores byte ranges; copy the file to this host")
            raise OSError(f"{len(data):,} bytes instead of {stop - start:,}")
        if not is_checked:
            info = self.info(stored.path)
            if info is None or self.stored(stored.url, info)[2:] != stored[2:]:
                raise SourceChanged(f"{stored.url}: it has changed")
        return data

    def _get(self, stored: StoredObject, start: int, stop: int) -> tuple[bytes, bool]:
        """The bytes, and whether they are certainly those of this version."""
        if self.is_s3 and stored.version:
            from fsspec.asyn import sync

            bucket, key, version_id = self.filesystem.split_path(stored.path)
            options = {"VersionId": version_id} if version_id else {"IfMatch": stored.version}
            response = self.filesystem.call_s3(
                "get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}", **options
            )
            return sync(self.filesystem.loop, response["Body"].read), True
        is_strong = stored.version.startswith('"')
        headers = {"headers": {"If-Match": stored.version}} if self.is_http and is_strong else {}
        data = bytes(self.filesystem.cat_file(stored.path, start=start, end=stop, **headers))
        is_commit = self.protocol == "hf" and HUB_COMMIT.search(stored.path) is not None
        return data, is_commit or bool(headers)


def has_glob(path: str) -> bool:
    return any(character in path for character in GLOB_CHARACTERS)


def fault_of(error: Exception) -> Fault:
    status = http_status(error)
    if isinstance(error, SourceChanged) or status in (412, 416):
        return Fault.CHANGED
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return Fault.MISSING
    if type(error).__name__ in CREDENTIAL_ERRORS:
        return Fault.NO_CREDENTIALS
    if isinstance(error, PermissionError) or status in (401, 403):
        return Fault.DENIED
    is_invalid = isinstance(error, OSError) and error.errno == 22 and status is None  # s3fs drops the status of a HEAD
    if is_invalid or (status is not None and 400 <= status < 500 and status not in (408, 409, 425, 429)):
        return Fault.REFUSED
    return Fault.PASSING


def translate_error(error: Exception, label: str, messages: Messages) -> Exception:
    """The error to raise in place of one of a store's library: TransferError if another attempt may succeed."""
    if isinstance(error, UserError | TransferError):
        return error
    fault, reason = fault_of(error), redact(one_line(error))
    if fault in messages:
        return UserError(f"{label}: {messages[fault].format(reason)}")
    if fault is Fault.CHANGED:
        return SourceChanged(f"{label}: it has changed")
    return TransferError(f"{label}: {type(error).__name__}: {reason}")


def http_status(error: BaseException | None) -> int | None:
    """The status of the answer, from the exceptions of botocore, aiohttp, requests and httpx."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        status = getattr(error, "status", None) or getattr(response, "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None

"""Objects behind fsspec URLs (s3://, gs://, https://, hf://, ...): listings, versions, and byte ranges with retries.

A store that is slow or fails costs time: requests are repeated with growing pauses until a limit. An object that is not
the version that was listed is an error; its bytes are never returned.
"""

import logging
import random
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from trainyard.core.errors import RunStopped, UserError, one_line
from trainyard.remote.sources.object_store import CREDENTIAL_ERRORS, open_filesystem
from trainyard.remote.sources.retry import process_ends

logger = logging.getLogger(__name__)
T = TypeVar("T")

LIST_LIMIT_S = 60.0
"""Seconds of retries until a listing fails. That is before the first step: a wrong address should not take long."""
READ_LIMIT_S = 600.0
"""Seconds of retries until a read fails. Other ranks wait in a collective meanwhile, for up to half an hour."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0
S3_PROTOCOLS = ("s3", "s3a")
S3_CLIENT = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 1}, "max_pool_connections": 32}
"""Settings of botocore, whose own retries would multiply with those of this module."""
VERSION_KEYS = ("ETag", "etag", "content_md5", "md5Hash", "sha256", "blob_id", "oid", "generation", "Last-Modified")
"""Entries of fsspec's `info` that change with the contents, the best first."""
TIME_KEYS = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
GLOB_CHARACTERS = "*?["


class ObjectChanged(UserError):
    """The object is not the version that the run began with."""


class StoredObject(NamedTuple):
    url: str
    path: str
    """Path in its file system."""
    size: int
    version: str
    """ETag, or what the store has instead; empty if it has nothing."""


class ObjectStore:
    """The objects of a bucket or host."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.protocol = url.partition("://")[0]
        options: dict[str, Any] = {}
        self.is_s3 = self.protocol in S3_PROTOCOLS
        if self.is_s3:
            configured = fsspec.config.conf.get(self.protocol, {}).get("config_kwargs", {})
            options = {"config_kwargs": {**S3_CLIENT, **configured}}
        self.filesystem, _ = open_filesystem(url, **options)
        self.is_http = self.protocol in ("http", "https")
        self.hub_commits: dict[str, str] = {}
        """hf://: the commit that is read of each repository, since branches move."""

    def find(self, url: str) -> StoredObject | None:
        """The object of this URL, as it is now; None if there is none."""
        path = self._path(url)
        info = self._retry(url, lambda: self._fresh_info(path))
        return self._stored(url, info) if info and info["type"] == "file" else None

    def match(self, pattern: str) -> list[StoredObject]:
        """The objects that match a glob, sorted by name; for a name without `*`, those below that prefix."""
        if self.is_http:
            return []  # has no listings
        path = self._path(pattern)
        is_glob = any(character in path for character in GLOB_CHARACTERS)

        def list_objects() -> dict[str, Any]:
            self.filesystem.invalidate_cache()
            try:
                found = self.filesystem.glob(path, detail=True) if is_glob else self.filesystem.find(path, detail=True)
            except FileNotFoundError:
                return {}
            return dict(found)

        found = self._retry(pattern, list_objects)
        names = sorted(name for name, info in found.items() if info["type"] == "file")
        return [self._stored(self._url(pattern, name), found[name]) for name in names]

    def read(self, stored: StoredObject, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` (exclusive) of this version of the object."""
        return self._retry(stored.url, lambda: self._read_once(stored, start, stop), is_read=True)

    def _read_once(self, stored: StoredObject, start: int, stop: int) -> bytes:
        data, is_checked = self._get(stored, start, stop)
        if len(data) != stop - start:
            if len(data) == stored.size:
                raise UserError(f"{stored.url}: the server ignores byte ranges; copy the file to this host")
            raise OSError(f"{len(data):,} bytes instead of {stop - start:,}")
        if not is_checked:
            info = self._fresh_info(stored.path)
            if info is None or self._stored(stored.url, info)[2:] != stored[2:]:
                raise ObjectChanged(changed_message(stored.url))
        return data

    def _get(self, stored: StoredObject, start: int, stop: int) -> tuple[bytes, bool]:
        """The bytes, and whether the server has compared the version."""
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
        is_fixed = any(f"@{commit}/" in stored.path for commit in self.hub_commits.values())
        data = bytes(self.filesystem.cat_file(stored.path, start=start, end=stop, **headers))
        return data, is_fixed or bool(headers)

    def _fresh_info(self, path: str) -> dict[str, Any] | None:
        self.filesystem.invalidate_cache()
        try:
            return dict(self.filesystem.info(path))
        except FileNotFoundError as error:
            status = _http_status(error)
            if status in (401, 403):  # fsspec's HTTP calls every failure FileNotFoundError
                raise PermissionError(f"HTTP status {status}") from None
            if status and (status == 429 or status >= 500):
                raise OSError(f"HTTP status {status}") from None
            if self.is_http and status is None and error.__cause__ is not None:
                raise OSError(one_line(error.__cause__)) from None
            return None

    def _stored(self, url: str, info: dict[str, Any]) -> StoredObject:
        version = next((info[key] for key in (*VERSION_KEYS, *TIME_KEYS) if info.get(key)), "")
        if isinstance(version, datetime):  # some file systems list a number and tell a date
            version = version.timestamp()
        if info.get("size") is None:
            raise UserError(f"{url}: the server does not tell its size; copy the file to this host")
        return StoredObject(url, str(info["name"]), int(info["size"]), str(version))

    def _path(self, url: str) -> str:
        path = str(self.filesystem._strip_protocol(url)).rstrip("/")
        return path if self.protocol != "hf" else self._retry(url, lambda: self._hub_path(path))

    def _url(self, pattern: str, path: str) -> str:
        """The URL of a path that was found under another URL, whose first part it shares."""
        for commit in self.hub_commits.values():
            path = path.replace(f"@{commit}/", "/")
        return f"{root_of(pattern)}/{path.lstrip('/').partition('/')[2]}"

    def _hub_path(self, path: str) -> str:
        """The path with the commit that its branch or tag is at when this process first asks."""
        from huggingface_hub import HfApi

        resolved = self.filesystem.resolve_path(path)
        if not hasattr(resolved, "revision"):  # a bucket
            return path
        name = f"{resolved.repo_type}/{resolved.repo_id}@{resolved.revision}"
        if name not in self.hub_commits:
            api = HfApi(endpoint=self.filesystem.endpoint, token=self.filesystem.token)
            info = api.repo_info(resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision)
            self.hub_commits[name] = str(info.sha)
        kind = "" if resolved.repo_type == "model" else f"{resolved.repo_type}s/"
        return f"{kind}{resolved.repo_id}@{self.hub_commits[name]}/{resolved.path_in_repo}".rstrip("/")

    def _retry(self, url: str, request: Callable[[], T], is_read: bool = False) -> T:
        limit_s = READ_LIMIT_S if is_read else LIST_LIMIT_S
        start = time.monotonic()
        pause = FIRST_PAUSE_S
        warn_after = 2.0
        while True:
            try:
                return request()
            except UserError:
                raise
            except Exception as error:
                if permanent := _permanent_error(url, error):
                    raise permanent from None
                waited = time.monotonic() - start
                reason = f"{type(error).__name__}: {one_line(error)}"
                if waited + pause > limit_s:
                    raise (RunStopped if is_read else UserError)(
                        f"{url}: the store has not answered for {waited:.0f} s: {reason}"
                    ) from None
                if waited >= warn_after:
                    logger.warning("%s: trying again since %.0f s, for up to %.0f: %s", url, waited, limit_s, reason)
                    warn_after = waited * 3
                if process_ends.wait(pause * random.uniform(0.5, 1.0)):  # ranks do not repeat at the same time
                    raise RunStopped(f"{url}: not read: the process ends") from None
                pause = min(2 * pause, MAX_PAUSE_S)


def root_of(url: str) -> str:
    """Protocol and first part (bucket or host) of a URL."""
    return "/".join(url.split("/")[:3])


def changed_message(url: str) -> str:
    return f"{url}: changed since the run began; restore that version, or start the run again"


def _permanent_error(url: str, error: Exception) -> UserError | None:
    """The error to report if the request would fail again."""
    status = _http_status(error)
    if status in (412, 416):
        return ObjectChanged(changed_message(url))
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return ObjectChanged(f"{url}: no such object any more; restore it")
    credentials = type(error).__name__ in CREDENTIAL_ERRORS
    if isinstance(error, PermissionError) or credentials or status in (401, 403):
        return UserError(f"{url}: no access with the credentials of this environment: {one_line(error)}")
    is_invalid = isinstance(error, OSError) and error.errno == 22 and status is None  # s3fs drops the status of a HEAD
    if is_invalid or (status is not None and 400 <= status < 500 and status not in (408, 409, 425, 429)):
        return UserError(f"{url}: the store refuses the request: {one_line(error)}")
    return None


def _http_status(error: BaseException | None) -> int | None:
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

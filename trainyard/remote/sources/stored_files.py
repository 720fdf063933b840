"""Files in object stores, for downloads. A public bucket needs no credentials: S3 is then asked anonymously."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from trainyard.core.errors import UserError
from trainyard.remote.credentials import redact
from trainyard.remote.manifest import check_upload
from trainyard.remote.object_store import (
    Fault,
    Messages,
    ObjectStore,
    StoredObject,
    fault_of,
    has_glob,
    translate_error,
)
from trainyard.remote.sources.remote_file import Checksum, RemoteFile, SourceChanged
from trainyard.remote.sources.retry import with_retries
from trainyard.remote.sources.web import etag_checksum

MESSAGES: Messages = {
    Fault.MISSING: "no such file, directory or bucket",
    Fault.DENIED: "access denied; set AWS_PROFILE, or ask the owner of the bucket for access",
    Fault.NO_CREDENTIALS: "{}; set AWS_PROFILE",
}


class StoredFile:
    """One version of an object, read for a download."""

    def __init__(self, store: ObjectStore, stored: StoredObject, sha256: str | None) -> None:
        self.store, self.stored, self.sha256 = store, stored, sha256

    def read(self, start: int, stop: int | None) -> Iterator[bytes]:
        try:
            data = self.store.read(self.stored, start, self.stored.size if stop is None else stop)
        except Exception as error:
            if fault_of(error) is Fault.MISSING:
                raise SourceChanged(f"{self.stored.url}: it was removed") from None
            raise translate_error(error, self.stored.url, MESSAGES) from None
        yield data

    def checksum(self) -> Checksum | None:
        if self.sha256:
            return Checksum("sha256", self.sha256)
        if not self.store.is_s3:
            return None
        bucket, _, key = self.stored.path.partition("/")
        try:
            head = self.store.filesystem.call_s3("head_object", Bucket=bucket, Key=key)
        except Exception as error:
            raise translate_error(error, self.stored.url, MESSAGES) from None
        if head.get("ETag") not in (None, self.stored.version):
            raise SourceChanged(f"{self.stored.url}: it has changed")
        return etag_checksum(head.get("ETag"), head.get("ServerSideEncryption"), head.get("SSECustomerKeyMD5"))


def list_stored_files(url: str) -> list[RemoteFile]:
    """The file at a URL, or all files in the directory there; a glob in the last component selects some."""
    return with_retries(lambda: _list_stored_files(url))


def is_one_file(files: list[RemoteFile], url: str) -> bool:
    """True if the listing of a URL is that of a file, not of a directory."""
    return len(files) == 1 and files[0].label == redact(url)


def _list_stored_files(url: str) -> list[RemoteFile]:
    directory, _, last = url.rpartition("/")
    pattern = last if has_glob(last) else None
    label = redact(url)
    store, found = _find(directory if pattern else url, label)
    root = store.path.strip("/")
    names = {key: key.strip("/").removeprefix(root).strip("/") for key in found}
    if pattern:
        names = {key: name for key, name in names.items() if fnmatchcase(name, pattern)}
    if not names:
        raise UserError(f"{label}: no such file or directory")
    is_file = list(names.values()) == [""]
    if is_file:
        names = dict.fromkeys(names, PurePosixPath(root).name)
    base = label.rpartition("/")[0] if pattern else label
    labels = {key: label if len(names) == 1 and not pattern else f"{base}/{name}" for key, name in names.items()}
    objects = {name: store.stored(labels[key], found[key]) for key, name in names.items()}
    sizes = {name: stored.size for name, stored in objects.items()}
    digests = {} if is_file else check_upload(store, store.path, pattern or "*", sizes, label)
    return [
        RemoteFile(name, stored.url, stored.size, stored.version or None, StoredFile(store, stored, digests.get(name)))
        for name, stored in sorted(objects.items())
    ]


def _find(url: str, label: str) -> tuple[ObjectStore, dict[str, dict[str, Any]]]:
    """Files at a URL, and the store to read them from."""
    store = ObjectStore(url)
    try:
        return store, _list_files(store)
    except Exception as error:
        if type(error).__name__ != "NoCredentialsError":
            raise translate_error(error, label, MESSAGES) from None
    store = ObjectStore(url, anon=True)
    try:
        return store, _list_files(store)
    except PermissionError:
        raise UserError(f"{label}: not public, and there are no credentials; set AWS_PROFILE") from None
    except Exception as error:
        raise translate_error(error, label, MESSAGES) from None


def _list_files(store: ObjectStore) -> dict[str, dict[str, Any]]:
    """Files at a path. A single one is asked about directly: public buckets may not allow listing."""
    info = store.info(store.path)
    if info is None:
        raise FileNotFoundError(store.path)
    return {info["name"]: info} if info["type"] == "file" else store.list_files(store.path)

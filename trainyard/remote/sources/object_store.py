"""Files in S3 and other stores that fsspec knows, with the credentials of its environment.

A public bucket needs none: without credentials, S3 is asked anonymously.
"""

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from trainyard.core.errors import UserError, one_line
from trainyard.core.quantities import counted
from trainyard.remote.credentials import redact
from trainyard.remote.sources.remote_file import Checksum, RemoteFile, SourceChanged, TransferError
from trainyard.remote.sources.retry import with_retries
from trainyard.remote.sources.web import etag_checksum

PIP_EXTRAS = {"s3": "s3", "s3a": "s3"}
"""The extra of the trainyard package that a protocol needs."""
MANIFEST_FILE = "trainyard-manifest.json"
"""Of `trainyard push`: size and SHA-256 of all files, and whether the upload is complete."""
CREDENTIAL_ERRORS = ("NoCredentialsError", "ProfileNotFound", "InvalidConfigError", "PartialCredentialsError")
"""Of botocore, which is not always installed."""


def open_filesystem(url: str, **options: Any) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it."""
    import fsspec

    protocol = url.partition("://")[0]
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        fix = f"pip install 'trainyard[{PIP_EXTRAS[protocol]}]'" if protocol in PIP_EXTRAS else one_line(error)
        raise UserError(f"{redact(url)}: {protocol}:// needs a package that is not installed: {fix}") from None
    except ValueError as error:
        raise UserError(f"{redact(url)}: {redact(one_line(error))}") from None
    return filesystem, path.rstrip("/")


class StoredFile:
    """A file of an fsspec file system."""

    def __init__(self, filesystem: Any, path: str, label: str, version: str | None, sha256: str | None) -> None:
        self.filesystem, self.path, self.label = filesystem, path, label
        self.version, self.sha256 = version, sha256

    def read(self, start: int, stop: int | None) -> Iterator[bytes]:
        try:
            # S3 refuses a read if the ETag is no longer the one that open has seen
            with self.filesystem.open(self.path, "rb", cache_type="none") as file:
                if self.version and _version(file.details) not in (None, self.version):
                    raise SourceChanged(f"{self.label}: it has changed")
                file.seek(start)
                yield file.read() if stop is None else file.read(stop - start)
        except FileNotFoundError:
            raise SourceChanged(f"{self.label}: it was removed") from None
        except (SourceChanged, UserError):
            raise
        except Exception as error:
            if "PreconditionFailed" in repr(error) or getattr(error, "errno", None) == 16:
                raise SourceChanged(f"{self.label}: it has changed") from None
            raise _translate(error, self.label) from None

    def checksum(self) -> Checksum | None:
        if self.sha256:
            return Checksum("sha256", self.sha256)
        if not hasattr(self.filesystem, "call_s3"):
            return None
        bucket, _, key = self.path.partition("/")
        try:
            head = self.filesystem.call_s3("head_object", Bucket=bucket, Key=key)
        except Exception as error:
            raise _translate(error, self.label) from None
        if self.version and head.get("ETag") != self.version:
            raise SourceChanged(f"{self.label}: it has changed")
        return etag_checksum(head.get("ETag"), head.get("ServerSideEncryption"), head.get("SSECustomerKeyMD5"))


def list_stored_files(url: str) -> list[RemoteFile]:
    """The file at a URL, or all files in the directory there; a glob in the last component selects some."""
    return with_retries(lambda: _list_stored_files(url))


def _list_stored_files(url: str) -> list[RemoteFile]:
    directory, _, last = url.rpartition("/")
    pattern = last if any(character in last for character in "*?[") else None
    label = redact(url)
    filesystem, path = open_filesystem(directory if pattern else url)
    try:
        found = _find(filesystem, path)
    except Exception as error:
        if type(error).__name__ != "NoCredentialsError":
            raise _translate(error, label) from None
        filesystem, path = open_filesystem(directory if pattern else url, anon=True)
        try:
            found = _find(filesystem, path)
        except Exception as second:
            if isinstance(second, PermissionError):
                raise UserError(f"{label}: not public, and there are no credentials; set AWS_PROFILE") from None
            raise _translate(second, label) from None
    root = path.strip("/")
    names = {key: key.strip("/").removeprefix(root).strip("/") for key in found}
    if pattern:
        names = {key: name for key, name in names.items() if fnmatchcase(name, pattern)}
    if not names:
        raise UserError(f"{label}: no such file or directory")
    is_file = list(names.values()) == [""]
    if is_file:
        names = dict.fromkeys(names, PurePosixPath(root).name)
    if unsafe := next((name for name in names.values() if {"", ".", ".."} & set(name.split("/"))), None):
        raise UserError(f"{label}: {unsafe!r} cannot be the name of a local file")
    sizes = {name: int(found[key].get("size") or 0) for key, name in names.items()}
    digests = {} if is_file else _check_manifest(filesystem, path, pattern or "*", sizes, label)
    base = label.rpartition("/")[0] if pattern else label
    out = []
    for key, name in sorted(names.items(), key=lambda item: item[1]):
        size, version = int(found[key].get("size") or 0), _version(found[key])
        file_label = label if len(names) == 1 and not pattern else f"{base}/{name}"
        out.append(
            RemoteFile(name, file_label, size, version, StoredFile(filesystem, key, label, version, digests.get(name)))
        )
    return out


def _find(filesystem: Any, path: str) -> dict[str, dict[str, Any]]:
    """Files at a path. A single one is asked about directly: public buckets may not allow listing."""
    filesystem.invalidate_cache()
    info = filesystem.info(path)
    if info.get("type") == "file":
        return {info["name"]: info}
    found: dict[str, dict[str, Any]] = filesystem.find(path, detail=True)
    return {key: info for key, info in found.items() if info.get("type") != "directory" and not key.endswith("/")}


class Manifest(NamedTuple):
    files: dict[str, tuple[int, str]]
    """Size in bytes and SHA-256 of each file of an upload; without the latter while the upload is not complete."""
    is_complete: bool


def read_manifest(filesystem: Any, path: str, label: str) -> Manifest | None:
    """The manifest of the upload at a path, if there is one. Raises UserError if it cannot be understood."""
    try:
        content = filesystem.cat_file(f"{path}/{MANIFEST_FILE}")
    except (FileNotFoundError, PermissionError):  # S3 without the right to list answers 403 for a missing object
        return None
    except Exception as error:
        raise _translate(error, label) from None
    try:
        data = json.loads(content)
        files = {str(name): (int(file["size"]), str(file.get("sha256", ""))) for name, file in data["files"].items()}
        return Manifest(files, data.get("complete", True) is True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{label}/{MANIFEST_FILE}: not a manifest: {one_line(error)}") from None


def _check_manifest(filesystem: Any, path: str, pattern: str, sizes: dict[str, int], label: str) -> dict[str, str]:
    """The SHA-256 of the files that match a glob below a path, from the manifest there or in a directory above. Raises
    UserError unless the upload is complete and has these sizes."""
    parts = path.split("/")
    roots = ("/".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    found = ((root, manifest) for root in roots if (manifest := read_manifest(filesystem, root, label)))
    root, manifest = next(found, (path, Manifest({}, True)))
    prefix = path[len(root) + 1 :] + "/" if path != root else ""
    named = {name.removeprefix(prefix): entry for name, entry in manifest.files.items() if name.startswith(prefix)}
    expected = {name: entry for name, entry in named.items() if fnmatchcase(name, pattern)}
    if expected and not manifest.is_complete:
        there = sum(sizes.get(name) == size for name, (size, _) in expected.items())
        raise UserError(
            f"{label}: an upload that did not finish: {there} of {counted(len(expected), 'file')} arrived; "
            "the same `trainyard push` completes it"
        )
    for name, (size, _) in expected.items():
        if sizes.get(name) != size:
            raise UserError(f"{label}/{name}: missing or of another size than {MANIFEST_FILE} says; upload it again")
    return {name: digest for name, (_, digest) in expected.items()}


def _version(info: dict[str, Any]) -> str | None:
    version = next((info[key] for key in ("ETag", "etag", "md5Hash", "generation", "mtime") if info.get(key)), None)
    return None if version is None else str(version)


def _translate(error: Exception, label: str) -> Exception:
    if isinstance(error, FileNotFoundError):
        return UserError(f"{label}: no such file, directory or bucket")
    if isinstance(error, PermissionError):
        return UserError(f"{label}: access denied; set AWS_PROFILE, or ask the owner of the bucket for access")
    if type(error).__name__ in CREDENTIAL_ERRORS:
        return UserError(f"{label}: {redact(one_line(error))}; set AWS_PROFILE")
    if isinstance(error, UserError | TransferError):
        return error
    return TransferError(f"{label}: {type(error).__name__}: {redact(one_line(error))}")

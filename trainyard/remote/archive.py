"""Unpacks archives that nobody has checked: nothing outside the target, no links, no devices, bounded size."""

import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from trainyard.core.disk_space import check_space
from trainyard.core.errors import UserError, one_line
from trainyard.core.quantities import size_text

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
COPY_BYTES = 2**22
MAX_MEMBERS = 10**6


class RefusedArchive(UserError):
    """The archive is damaged, or has content that is never unpacked: downloading the same bytes again does not help."""


class _Member(NamedTuple):
    name: str
    is_directory: bool
    size: int
    file: IO[bytes] | None


def is_archive(name: str) -> bool:
    return name.lower().endswith(ARCHIVE_SUFFIXES)


def unpack(archive: Path, directory: Path, max_bytes: int, label: str) -> int:
    """Unpack into a new directory; returns the number of files. On an error, the directory is incomplete."""
    directory.mkdir(parents=True)
    written = count = files = 0
    with _archive_errors(label):
        for member in _members(archive):
            count += 1
            if count > MAX_MEMBERS:
                raise RefusedArchive(f"{label}: has more than {MAX_MEMBERS:,} members")
            path = directory / _safe_name(member.name, label)
            if member.is_directory:
                path.mkdir(parents=True, exist_ok=True)
                continue
            if member.file is None:
                raise RefusedArchive(f"{label}: {member.name!r} is a link, a device or another special file")
            if written + member.size > max_bytes:
                raise _too_large(label, max_bytes)
            check_space(directory, member.size, label)
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                raise RefusedArchive(f"{label}: has {member.name!r} twice")
            written += _copy(member, path, max_bytes - written, label, max_bytes)
            files += 1
    if not files:
        raise RefusedArchive(f"{label}: an archive without files")
    return files


def _members(archive: Path) -> Iterator[_Member]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                kind = info.external_attr >> 28  # the upper bits of the mode on Unix: 8 is a file, 4 a directory
                if info.is_dir():
                    yield _Member(info.filename, True, 0, None)
                elif kind not in (0, 8):
                    yield _Member(info.filename, False, 0, None)
                else:
                    with opened.open(info) as file:
                        yield _Member(info.filename, False, info.file_size, file)
        return
    with tarfile.open(archive, "r:*") as tar:
        for entry in tar:
            if entry.isdir():
                yield _Member(entry.name, True, 0, None)
            elif not entry.isreg():
                yield _Member(entry.name, False, 0, None)
            else:
                yield _Member(entry.name, False, entry.size, tar.extractfile(entry))


def _safe_name(name: str, label: str) -> Path:
    """The relative path of a member. Names that lead out of the directory are refused, not repaired."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or (name[1:2] == ":"):
        raise RefusedArchive(f"{label}: {name!r} leads out of the target directory; nothing is unpacked")
    return Path(*path.parts)


def _copy(member: _Member, path: Path, limit: int, label: str, max_bytes: int) -> int:
    """Write a member; returns its bytes. The size that an archive announces may be wrong."""
    count = 0
    assert member.file
    with path.open("xb") as target:
        while block := member.file.read(COPY_BYTES):
            count += len(block)
            if count > limit:
                raise _too_large(label, max_bytes)
            target.write(block)
        target.flush()
        os.fsync(target.fileno())
    if count != member.size:
        raise RefusedArchive(f"{label}: damaged: {member.name!r} has {count:,} bytes instead of {member.size:,}")
    return count


def _too_large(label: str, max_bytes: int) -> RefusedArchive:
    return RefusedArchive(f"{label}: unpacks to more than {size_text(max_bytes)}; if that is right, raise --max-size")


@contextmanager
def _archive_errors(label: str) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, LZMAError, NotImplementedError) as error:
        raise RefusedArchive(f"{label}: not a complete archive: {one_line(error) or type(error).__name__}") from None
    except OSError as error:
        if error.errno is not None:  # of the disk; the decompressors' errors have none
            raise
        raise RefusedArchive(f"{label}: not a complete archive: {one_line(error)}") from None

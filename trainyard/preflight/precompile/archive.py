"""Archives of compiled code: packed where it was precompiled, unpacked on the nodes that use it.

An archive is a tar file that starts with a manifest: the fingerprint of the toolchain, and size and checksum of each
file. It contains code that training runs, so trust it like a program: nothing protects against its author.
`unpack_cache` checks that the archive is complete, that it fits this machine, and that no file leaves the cache
directory.

torch.compiler.save_cache_artifacts is no substitute: its artifacts contain torch's indexes but not the libraries of C++
kernels, so every node would run the C++ compiler again (torch 2.13).
"""

import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trainyard.core.atomic_files import atomic_file
from trainyard.core.errors import UserError, one_line
from trainyard.core.quantities import counted

MANIFEST = "trainyard-pack.json"
FORMAT_VERSION = 1
INDEX_DIRS = ("fxgraph", "aotautograd", "runs")
"""Indexes are moved into place last, after the files they refer to."""
MAX_MANIFEST_BYTES = 64 << 20
"""Larger manifests are rejected."""
MAX_NAME_LENGTH, MAX_PATH_LENGTH = 255, 1024
"""Longest file name, which is Linux's, and longest path in an archive. torch names its files in ASCII."""


@dataclass(frozen=True)
class ArchiveContents:
    """The manifest of an archive."""

    fingerprint: dict[str, str]
    files: dict[str, tuple[int, str]]
    """Size and SHA-256 by path."""

    @property
    def total_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def pack_cache(cache_dir: Path, target: Path, names: list[str], fingerprint: Mapping[str, str]) -> ArchiveContents:
    """Write the named files of a cache to the archive `target`."""
    files = {
        name: (path.stat().st_size, _sha256(path)) for name in sorted(names) if (path := cache_dir / name).is_file()
    }
    contents = ArchiveContents(dict(fingerprint), files)
    manifest = {"format": FORMAT_VERSION, "fingerprint": contents.fingerprint, "files": files}
    text = json.dumps(manifest, indent=1).encode()
    with atomic_file(target) as out, tarfile.open(fileobj=out, mode="w") as tar:
        header = tarfile.TarInfo(MANIFEST)
        header.size = len(text)
        tar.addfile(header, io.BytesIO(text))
        for name in files:
            tar.add(cache_dir / name, name, recursive=False)
    return contents


def unpack_cache(
    source: Path, cache_dir: Path, fingerprint: Mapping[str, str], on_progress: Callable[[int], None]
) -> ArchiveContents:
    """Verify the whole archive, then move its files into `cache_dir`. `on_progress` receives the bytes read so far."""
    try:
        with tarfile.open(source, "r:") as tar:
            contents = _read_manifest(tar, source)
            check_fingerprint(contents.fingerprint, fingerprint, source)
            cache_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".unpacking-") as staging:
                _extract(tar, contents, Path(staging), source, on_progress)
                for name in sorted(contents.files, key=lambda path: PurePosixPath(path).parts[0] in INDEX_DIRS):
                    (cache_dir / name).parent.mkdir(parents=True, exist_ok=True)
                    (Path(staging) / name).replace(cache_dir / name)
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{source}: not an archive, or truncated ({one_line(error)}); pack it again") from None
    except OSError as error:
        raise UserError(f"{source}: cannot be unpacked to {cache_dir}: {one_line(error)}") from None
    return contents


def check_fingerprint(archived: Mapping[str, str], current: Mapping[str, str], source: Path) -> None:
    differences = [
        f"{name}: {archived.get(name)}, here {current[name]}" for name in current if archived.get(name) != current[name]
    ]
    if differences:
        raise UserError(
            f"{source}: compiled for a different toolchain ({'; '.join(differences)}); "
            "precompile here, or on an identical machine"
        )


def _read_manifest(tar: tarfile.TarFile, source: Path) -> ArchiveContents:
    member = tar.next()
    stream = tar.extractfile(member) if member and member.isfile() and member.name == MANIFEST else None
    if member is None or stream is None or member.size > MAX_MANIFEST_BYTES:
        raise UserError(f"{source}: not an archive of `trainyard cache pack`: it does not begin with {MANIFEST}")
    try:
        manifest: dict[str, Any] = json.loads(stream.read())
        if manifest["format"] != FORMAT_VERSION:
            raise UserError(f"{source}: archive format {manifest['format']}; this version reads {FORMAT_VERSION}")
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
        archived_fingerprint = {str(name): str(value) for name, value in manifest["fingerprint"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{source}: unreadable manifest ({one_line(error)}); pack it again") from None
    directories = {str(parent) for name in files for parent in PurePosixPath(name).parents}
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name or "\0" in name:
            raise UserError(f"{source}: {name!r} would leave the cache; refusing to unpack")
        if not name.isascii() or max(map(len, path.parts)) > MAX_NAME_LENGTH or len(name) > MAX_PATH_LENGTH:
            raise UserError(f"{source}: {name[:40]!r}...: not ASCII, or too long for a file; refusing to unpack")
        if name in directories or str(path) != name:
            raise UserError(f"{source}: {name!r} is a directory too, or not its shortest form; refusing to unpack")
    return ArchiveContents(archived_fingerprint, files)


def _extract(
    tar: tarfile.TarFile, contents: ArchiveContents, directory: Path, source: Path, on_progress: Callable[[int], None]
) -> None:
    remaining, done = dict(contents.files), 0
    while (member := tar.next()) is not None:
        if not member.isfile() or member.name not in remaining:
            raise UserError(f"{source}: {member.name!r} is not in the manifest; refusing to unpack")
        size, digest = remaining.pop(member.name)
        stream = tar.extractfile(member)
        assert stream is not None
        path = directory / member.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            shutil.copyfileobj(stream, out)
        if member.size != size or _sha256(path) != digest:
            raise UserError(f"{source}: {member.name} is damaged; copy the archive again")
        if path.suffix == ".so":
            path.chmod(0o755)
        done += size
        on_progress(done)
    if remaining:
        raise UserError(
            f"{source}: lacks {counted(len(remaining), 'file')}, such as {min(remaining)}; copy the archive again"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

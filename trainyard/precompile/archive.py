"""Compiled code as one file: packed where it was precompiled, unpacked on the nodes that will use it.

A pack is a tar with a list first: what must agree (`kept.fingerprint`), and each file's size and checksum. It holds
code that will be run, so it is trusted as a program is: nothing in it protects against who made it. What is checked is
that it is whole, that it fits this machine, and that nothing leaves the cache's directory.
"""

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from trainyard.core.atomic_files import atomic_file
from trainyard.core.errors import UserError, one_line

MANIFEST = "trainyard-pack.json"
FORMAT_VERSION = 1
INDEX_DIRS = ("fxgraph", "aotautograd", "runs")
"""Put in place last: what they speak of is there then."""
MAX_MANIFEST_BYTES = 64 << 20
"""Bytes of the list."""
COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class ArchiveContents:
    fingerprint: dict[str, str]
    files: dict[str, tuple[int, str]]
    """Size and SHA-256 by path."""

    @property
    def total_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def pack_cache(cache_dir: Path, target: Path, names: list[str], fingerprint: Mapping[str, str]) -> ArchiveContents:
    """Write these files of a cache to `target`."""
    files = {
        name: (path.stat().st_size, _sha256(path)) for name in sorted(names) if (path := cache_dir / name).is_file()
    }
    contents = ArchiveContents(dict(fingerprint), files)
    said = {"format": FORMAT_VERSION, "fingerprint": contents.fingerprint, "files": files}
    text = json.dumps(said, indent=1).encode()
    with atomic_file(target) as out, tarfile.open(fileobj=out, mode="w") as tar:
        head = tarfile.TarInfo(MANIFEST)
        head.size = len(text)
        tar.addfile(head, io.BytesIO(text))
        for name in files:
            tar.add(cache_dir / name, name, recursive=False)
    return contents


def unpack_cache(
    source: Path, cache_dir: Path, fingerprint: Mapping[str, str], on_progress: Callable[[int], None]
) -> ArchiveContents:
    """Check all of a pack, then put its files into the cache at `place`. `see` is told the bytes read so far."""
    try:
        with tarfile.open(source, "r:") as tar:
            contents = _read_manifest(tar, source)
            check_fingerprint(contents.fingerprint, fingerprint, source)
            cache_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".unpacking-") as name:
                _extract(tar, contents, Path(name), source, on_progress)
                for each in sorted(contents.files, key=lambda path: PurePosixPath(path).parts[0] in INDEX_DIRS):
                    (cache_dir / each).parent.mkdir(parents=True, exist_ok=True)
                    (Path(name) / each).replace(cache_dir / each)
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{source}: not a pack, or cut off ({one_line(error)}); pack it again") from None
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: no such file") from None
    return contents


def check_fingerprint(theirs: Mapping[str, str], ours: Mapping[str, str], source: Path) -> None:
    wrong = [f"{name}: {theirs.get(name)}, here {ours[name]}" for name in ours if theirs.get(name) != ours[name]]
    if wrong:
        raise UserError(
            f"{source}: compiled for another toolchain ({'; '.join(wrong)}); precompile here, or on a machine like this"
        )


def _read_manifest(tar: tarfile.TarFile, source: Path) -> ArchiveContents:
    first = tar.next()
    stream = tar.extractfile(first) if first and first.isfile() and first.name == MANIFEST else None
    if first is None or stream is None or first.size > MAX_MANIFEST_BYTES:
        raise UserError(f"{source}: not a pack: it does not begin with {MANIFEST}; `trainyard cache pack` makes one")
    try:
        said: dict[str, Any] = json.loads(stream.read())
        if said["format"] != FORMAT_VERSION:
            raise UserError(f"{source}: a pack of format {said['format']}; this version reads {FORMAT_VERSION}")
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in said["files"].items()}
        found = {str(name): str(value) for name, value in said["fingerprint"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{source}: its list cannot be read ({one_line(error)}); pack it again") from None
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name or "\0" in name:
            raise UserError(f"{source}: {name!r} would leave the cache; not a pack of ours")
    return ArchiveContents(found, files)


def _extract(
    tar: tarfile.TarFile, contents: ArchiveContents, to: Path, source: Path, see: Callable[[int], None]
) -> None:
    left, done = dict(contents.files), 0
    while (member := tar.next()) is not None:
        if not member.isfile() or member.name not in left:
            raise UserError(f"{source}: {member.name!r} is not in its list; not a pack of ours")
        size, digest = left.pop(member.name)
        stream = tar.extractfile(member)
        assert stream is not None
        path = to / member.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            if member.size != size or _copy_and_hash(stream, out) != digest:
                raise UserError(f"{source}: {member.name} is damaged; copy the pack again")
        if path.suffix == ".so":
            path.chmod(0o755)
        done += size
        see(done)
    if left:
        raise UserError(f"{source}: {len(left)} files are missing, {min(left)} for one; copy the pack again")


def _copy_and_hash(stream: IO[bytes], out: IO[bytes] | None) -> str:
    """The checksum of what is read, and written where there is somewhere to."""
    digest = hashlib.sha256()
    while piece := stream.read(COPY_BYTES):
        digest.update(piece)
        if out:
            out.write(piece)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return _copy_and_hash(file, None)

"""Shard files in the memory of the hosts of a run, and their transfer between hosts.

    DIRECTORY/trainyard-UID/RUN/step_00000100/rank_00000.safetensors    this host's ranks, and those of another host
    DIRECTORY/trainyard-UID/RUN/step_00000100/manifest.json             what a commit file says, except for the files

DIRECTORY is a file system in memory. It outlives the processes of a failed run, but not its host.
"""

import json
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist

from trainyard.checkpoint import checkpoint
from trainyard.checkpoint.file_names import step_directory
from trainyard.checkpoint.safetensors_file import tensor_bytes
from trainyard.core.atomic_files import atomic_file
from trainyard.core.errors import UserError
from trainyard.remote.storage import LocalStorage

MANIFEST_FILE = "manifest.json"
HOST_FILE = "host"
"""Identifies a host by what is in its memory: host names may be equal in containers."""
CHUNK_BYTES = 2**25
"""Bytes sent at a time."""
TIMEOUT = timedelta(minutes=30)
"""Limit of the wait for the rank at the other end."""


def run_storage(directory: str, run_id: str) -> LocalStorage:
    """Where a run has its copies on this host. Other users cannot read them."""
    if not os.path.isdir(directory):
        raise UserError(f"checkpoint.memory_directory={directory}: no such directory on {os.uname().nodename}")
    parent = Path(directory) / f"trainyard-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.is_symlink() or parent.stat().st_uid != os.getuid():
        raise UserError(f"checkpoint.memory_directory={directory}: {parent} belongs to another user")
    return LocalStorage(parent / run_id)


def host_identity(storage: LocalStorage) -> str:
    """A name of this host that the ranks of a run share, and no other host has. It is removed with the run's copies."""
    storage.path.mkdir(mode=0o700, exist_ok=True)
    path = storage.path / HOST_FILE
    draft = path.with_name(f".{HOST_FILE}.{uuid4().hex}")
    draft.write_text(draft.name)
    with suppress(FileExistsError):  # another rank was first
        os.link(draft, path)
    draft.unlink()
    return path.read_text(encoding="utf-8")


def list_files(storage: LocalStorage) -> dict[int, dict[str, int]]:
    """The complete files of each step on this host, with their sizes."""
    out = {}
    for step in checkpoint.list_steps(storage):
        directory = storage / step_directory(step)
        names = [name for name in directory.listdir() if name.endswith(".safetensors") and not name.startswith(".")]
        out[step] = {name: size for name in names if (size := directory.file_size(name)) is not None}
    return out


def write_manifest(storage: LocalStorage, manifest: dict[str, Any]) -> None:
    with storage.write(MANIFEST_FILE) as file:
        file.write(json.dumps(manifest).encode())


def read_manifest(storage: LocalStorage) -> dict[str, Any] | None:
    try:
        return dict(json.loads((storage.path / MANIFEST_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


class FileTransfer(NamedTuple):
    """One end of the transfer of a file: to or from another rank."""

    path: Path
    peer: int
    """Global rank."""
    size: int


def transfer_files(send: FileTransfer | None, receive: FileTransfer | None, group: dist.ProcessGroup) -> None:
    """Send a file and receive another one at the same time, in chunks. `group` is a gloo group."""
    source = send.path.open("rb") if send else None
    try:
        if not receive:
            _transfer(send, source, None, None, group)
        else:
            with atomic_file(receive.path) as target:
                _transfer(send, source, receive, target, group)
    finally:
        if source:
            source.close()


def _transfer(
    send: FileTransfer | None,
    source: BinaryIO | None,
    receive: FileTransfer | None,
    target: BinaryIO | None,
    group: dist.ProcessGroup,
) -> None:
    outgoing, incoming = (torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(2))
    for start in range(0, max(end.size for end in (send, receive) if end), CHUNK_BYTES):
        pending = None
        if send and source and start < send.size:
            part = outgoing[: min(CHUNK_BYTES, send.size - start)]
            part.copy_(torch.frombuffer(bytearray(source.read(len(part))), dtype=torch.uint8))
            pending = dist.isend(part, dst=send.peer, group=group)
        if receive and target and start < receive.size:
            part = incoming[: min(CHUNK_BYTES, receive.size - start)]
            dist.recv(part, src=receive.peer, group=group)
            target.write(tensor_bytes(part))
        if pending:
            pending.wait()

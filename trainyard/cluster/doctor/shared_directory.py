"""Is the directory of the runs the same one on all nodes, and do locks work between them?

Nodes look files up by name: a listing may be minutes old on NFS, the lookup of a name that was never asked for is not.
"""

import fcntl
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from trainyard.cluster.doctor.file_system import nearest_directory
from trainyard.cluster.doctor.node_findings import compress_hosts
from trainyard.core.finding import Finding

FIRST, LAST = "first", "last"
"""Files that the first and the last node create."""


class SharedDirectoryProbe:
    """One node's part of the check. The first node creates a file and locks it, the others look for it, the last one
    creates another, and the first looks for that."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.locked: IO[str] | None = None

    def create(self, directory: str) -> str:
        """On the first node. Returns the temporary directory; raises OSError if it cannot be created."""
        parent = nearest_directory(Path(directory))
        self.path = Path(tempfile.mkdtemp(prefix=".trainyard-doctor-", dir=parent))
        self.locked = (self.path / FIRST).open("w")
        with suppress(OSError):  # the checks of the file system report it
            fcntl.flock(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return str(self.path)

    def look(self, path: str, is_last: bool) -> dict[str, bool]:
        """On the other nodes."""
        try:
            if is_last:
                (Path(path) / LAST).touch()
            with (Path(path) / FIRST).open("r+") as file:  # NFS locks files that are open for writing
                return {"seen": True, "refused": _is_refused(file)}
        except OSError:
            return {"seen": False, "refused": False}

    def finish(self) -> dict[str, bool]:
        """On the first node: look for the file of the last one."""
        seen = self.path is not None and (self.path / LAST).exists()
        self.close()
        return {"seen": seen}

    def close(self) -> None:
        if self.locked:
            self.locked.close()
        if self.path:
            shutil.rmtree(self.path, ignore_errors=True)
        self.path = self.locked = None


def _is_refused(file: IO[str]) -> bool:
    """True if another node's lock keeps this one from locking the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def shared_directory_finding(directory: str, nodes: list[str], looks: dict[str, Any], first_sees_last: bool) -> Finding:
    """What the nodes saw. `looks` has the answers of all nodes but the first."""
    blind = [node for node in nodes[1:] if not looks[node]["seen"]]
    fix = "set log.directory to a file system that all nodes mount (NFS, Lustre, EFS)"
    if blind:
        see = "does not see" if len(blind) == 1 else "do not see"
        text = f"{directory}: {compress_hosts(blind)} {see} a file that {nodes[0]} created"
        return Finding("shared directory", "error", text, fix)
    if not first_sees_last:
        text = f"{directory}: {nodes[0]} does not see a file that {nodes[-1]} created"
        return Finding("shared directory", "error", text, fix)
    granted = [node for node in nodes[1:] if not looks[node]["refused"]]
    if granted:
        text = f"{directory}: {compress_hosts(granted)} can lock a file that {nodes[0]} has locked"
        fix = "mount it with locks (Lustre: -o flock; NFS: without nolock), or start no run twice"
        return Finding("shared directory", "warning", text, fix)
    return Finding("shared directory", "ok", f"{directory}: all nodes see the same files and locks")

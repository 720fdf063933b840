"""A checkpoint that is spread over the memory of the hosts of a run (in_memory_saver.py)."""

from typing import Any

import torch.distributed as dist

from trainyard.checkpoint import checkpoint
from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.checkpoint.file_names import step_directory
from trainyard.config.load import parse
from trainyard.models import blueprint_of
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import Mesh
from trainyard.remote.storage import LocalStorage
from trainyard.run.checkpointing.memory_files import (
    TIMEOUT,
    FileTransfer,
    host_identity,
    list_files,
    read_manifest,
    run_storage,
    transfer_files,
)


class MemoryCheckpoint(Checkpoint):
    """A copy of the state whose files are on several hosts. `fetch` brings those that a host needs to it."""

    def __init__(self, storage: LocalStorage, mesh: Mesh, hosts: list[str], holders: dict[str, list[int]]) -> None:
        """`hosts` has the host of every rank; `holders` the first ranks of the hosts that hold each file. Both count
        ranks in layout order."""
        super().__init__(storage)
        self.local_storage, self.mesh, self.hosts, self.holders = storage, mesh, hosts, holders

    def fetch(self, files: set[str]) -> None:
        """Copy files from hosts that have them. All ranks call this, each with the files that it reads."""
        mesh, first_of = self.mesh, {host: self.hosts.index(host) for host in self.hosts}
        wanted = mesh.all_gather_object(sorted(name for name in files if self.local_storage.file_size(name) is None))
        targets = sorted(
            {(name, first_of[host]) for host, names in zip(self.hosts, wanted, strict=True) for name in names}
        )
        if targets:
            group: Any = dist.new_group(backend="gloo", timeout=TIMEOUT)
            for number, (name, target) in enumerate(targets):  # one order for all ranks: no two wait for each other
                sources = self.holders[name]
                source, path = sources[number % len(sources)], self.local_storage.path / name
                size = self.manifest["files"][name]["bytes"]
                if mesh.layout_rank == source:
                    transfer_files(FileTransfer(path, mesh.rank_order[target], size), None, group)
                elif mesh.layout_rank == target:
                    transfer_files(None, FileTransfer(path, mesh.rank_order[source], size), group)
            dist.destroy_process_group(group)
        mesh.all_gather_object(None)  # the files are complete


def find_memory_checkpoint(directory: str, run_id: str, newer_than: int, mesh: Mesh) -> MemoryCheckpoint | None:
    """The latest copy of a run below `directory`, in host memory, later than step `newer_than`, of which every file
    exists on some host.

    All ranks call this.
    """
    storage = run_storage(directory, run_id)
    hosts = mesh.all_gather_object(host_identity(storage))
    is_first = hosts.index(hosts[mesh.layout_rank]) == mesh.layout_rank
    listings = mesh.all_gather_object(list_files(storage) if is_first else {})
    for step in sorted({step for listing in listings for step in listing if step > newer_than}, reverse=True):
        copy = storage / step_directory(step)
        holders: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        for rank, listing in enumerate(listings):
            for name, size in listing.get(step, {}).items():
                holders.setdefault(name, []).append(rank)
                sizes[name] = size
        manifests = mesh.all_gather_object(read_manifest(copy) if is_first else None)
        manifest = next(filter(None, manifests), None)
        if manifest is None or len(holders) != manifest["world_size"]:
            continue
        if is_first:
            _write_commit_file(copy, manifest, sizes)
        mesh.all_gather_object(None)  # the commit file is on every host
        return MemoryCheckpoint(copy, mesh, hosts, holders)
    return None


def _write_commit_file(directory: LocalStorage, manifest: dict[str, Any], sizes: dict[str, int]) -> None:
    saved = parse(manifest["config"])
    layout = Layout.from_config(saved, manifest["world_size"])
    blueprint = blueprint_of(saved.model)
    table = checkpoint.build_shard_table(blueprint, layout, blueprint.trained_names())
    directory.mkdir()
    checkpoint.write_commit_file(directory, table, sizes, {**manifest, "model_files": {}})

"""Copies this rank's slices of the training state to host memory while training continues, and writes the copy as a
shard file."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainyard.checkpoint.native import checkpoint
from trainyard.checkpoint.native.file_names import shard_name
from trainyard.checkpoint.native.partition import owned_slices
from trainyard.checkpoint.native.shard_file import write_shard
from trainyard.devices import Device
from trainyard.families.blueprint import Blueprint
from trainyard.parallel.mesh import Mesh
from trainyard.train.checkpointing.pending_save import PendingSave
from trainyard.train.checkpointing.rng_state import RngState
from trainyard.train.optim.gather_full import slice_view
from trainyard.train.optim.optimizer import Optimizer


class StateWriter:
    """Owns the host buffers of one copy of the state. They stay allocated until `release`."""

    def __init__(self, blueprint: Blueprint, optimizer: Optimizer, device: Device, mesh: Mesh) -> None:
        self.optimizer, self.device, self.mesh = optimizer, device, mesh
        self.slices = owned_slices(blueprint, mesh.layout, mesh.layout_rank)
        """What this rank writes."""
        self.state_buffers = optimizer.state.saved_buffers()
        self.host_slices: dict[str, list[Tensor]] = {}
        """Host copies of the slices, by kind of state; views of one buffer each."""

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {kind: buffer.dtype for kind, buffer in self.state_buffers.items()}

    @property
    def bytes_per_weight(self) -> int:
        return sum(dtype.itemsize for dtype in self.dtypes.values())

    def start_copy(self, save: PendingSave, rng: RngState) -> Callable[[], None]:
        """Start copying this rank's slices to host memory; the next update waits for that. Returns a function that
        waits for the copies."""
        save.rng_tensors, save.rng_texts = rng.encode(self.mesh.layout_rank)
        counters = self.optimizer.guard.update_count, self.optimizer.guard.skip_counts
        save.update_count, save.skip_counts = (
            self.device.alloc_host_buffer(c.numel(), c.dtype).view(c.shape) for c in counters
        )
        pairs = [(counters[0], save.update_count), (counters[1], save.skip_counts)]
        state, sizes = self.optimizer.state, [piece.numel for piece in self.slices]
        for kind, buffer in self.state_buffers.items():
            if kind not in self.host_slices:
                host_buffer = self.device.alloc_host_buffer(sum(sizes), buffer.dtype).zero_()
                parts = zip(host_buffer.split_with_sizes(sizes), self.slices, strict=True)
                self.host_slices[kind] = [part.view(piece.sizes) for part, piece in parts]
            # Parameters without a second moment (Muon) have zeros there, so that all files have one format.
            pairs += [
                (slice_view(state, self.mesh, buffer, piece), host)
                for piece, host in zip(self.slices, self.host_slices[kind], strict=True)
                if state.has(piece.param, kind)
            ]
        copies = self.device.start_host_copies(pairs)

        def fence() -> None:
            begin = time.monotonic()
            copies.fence()
            save.stall_s += time.monotonic() - begin

        self.optimizer.fence_next_update(fence)
        return copies.wait

    def write(self, save: PendingSave, wait_for_copies: Callable[[], None]) -> None:
        """Write this rank's shard file of a checkpoint."""
        wait_for_copies()
        tensors: list[tuple[str, Sequence[int], Tensor]] = [
            (checkpoint.tensor_key(kind, piece.name), piece.offsets, values)
            for kind, host_slices in self.host_slices.items()
            for piece, values in zip(self.slices, host_slices, strict=True)
        ]
        tensors += [(name, [0], tensor) for name, tensor in save.rng_tensors.items()]
        write_shard(save.storage, shard_name(self.mesh.layout_rank), tensors, save.rng_texts)

    def release(self) -> None:
        """Free the host buffers."""
        self.host_slices.clear()

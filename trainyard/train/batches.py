"""Which part of a batch a rank works on: its samples (data parallel), its tokens (context parallel), few at a time."""

from collections.abc import Iterator

import torch

from trainyard.devices import Device
from trainyard.models import Batch
from trainyard.train.losses import IGNORED

SEQUENCES = ("tokens", "segments", "mask", "positions", "documents")
"""Entries with a value for each token; labels too, except where `places` says what they belong to."""


def samples(total: int, ranks: int, rank: int) -> slice:
    """The rows of a global batch of `total` that a data-parallel rank has."""
    each = total // ranks
    return slice(rank * each, (rank + 1) * each)


def context_part(batch: Batch, size: int, rank: int) -> Batch:
    """The tokens that context-parallel rank `rank` holds: chunks `rank` and 2 size - 1 - rank of 2 size."""
    if size == 1:
        return batch
    chunk = batch["tokens"].shape[1] // (2 * size)
    names = SEQUENCES if "places" in batch else (*SEQUENCES, "labels")
    out = dict(batch)
    for name in names:
        if name in batch:
            chunks = batch[name].chunk(2 * size, 1)
            out[name] = torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), 1)
    if "places" in batch:
        # Masked places that other ranks hold count there; the shape stays. The first token decides on the pair.
        where, within = batch["places"] // chunk, batch["places"] % chunk
        low, high = where == rank, where == 2 * size - 1 - rank
        out["places"] = torch.where(low, within, torch.where(high, within + chunk, 0))
        out["labels"] = torch.where(low | high, batch["labels"], IGNORED)
        if rank:
            out["next_sentence"] = torch.full_like(batch["next_sentence"], IGNORED)
    return out


def micro_batches(batch: Batch, size: int) -> Iterator[Batch]:
    total = len(batch["sample"])
    for first in range(0, total, size):
        yield {name: tensor[first : first + size] for name, tensor in batch.items()}


def send(batch: Batch, device: Device) -> Batch:
    return {name: device.to_device(tensor) for name, tensor in batch.items()}

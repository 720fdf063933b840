"""The metadata of torch.distributed.checkpoint (DCP), one of whose classes has a private name."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DcpPlace:
    """A full tensor in a range of bytes of a file, in the format of torch.save."""

    file: str
    start: int
    length: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def encode_dcp_metadata(places: Mapping[str, DcpPlace]) -> bytes:
    """The content of `.metadata` for a flat state dict of unsharded tensors (torch 2.9 to 2.14)."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # here, because importing it takes long
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors, storage = {}, {}
    for name, place in places.items():
        shape, offsets = torch.Size(place.shape), torch.Size([0] * len(place.shape))
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=shape)
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=place.dtype), shape, [chunk])
        storage[MetadataIndex(name, offsets)] = _StorageInfo(place.file, place.start, place.length)
    return pickle.dumps(Metadata(dict(tensors), {name: (name,) for name in places}, storage))

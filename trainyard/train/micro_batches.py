"""Which part of a batch a rank works on: its samples (data parallel), its tokens (context parallel), few at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from trainyard.core.constants import IGNORE_INDEX
from trainyard.models import Batch

PACKED_LENGTH_MULTIPLE = 512
"""Tokens of a packed micro batch come in multiples of this."""
TOKEN_FIELDS = ("tokens", "segment_ids", "attention_mask", "position_ids", "document_ids")
"""Entries with a value for each token; labels too, except where `places` says what they belong to."""


def rank_samples(global_batch: int, ranks: int, rank: int) -> slice:
    """The rows of a global batch of `total` that a data-parallel rank has."""
    each = global_batch // ranks
    return slice(rank * each, (rank + 1) * each)


def context_parallel_shard(batch: Batch, size: int, rank: int) -> Batch:
    """The tokens that context-parallel rank `rank` holds: chunks `rank` and 2 size - 1 - rank of 2 size."""
    if size == 1:
        return batch
    chunk = batch["tokens"].shape[1] // (2 * size)
    names = TOKEN_FIELDS if "masked_positions" in batch else (*TOKEN_FIELDS, "labels")
    out = dict(batch)
    for name in names:
        if name in batch:
            chunks = batch[name].chunk(2 * size, 1)
            out[name] = torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), 1)
    if "masked_positions" in batch:
        # Masked places that other ranks hold count there; the shape stays. The first token decides on the pair.
        where, within = batch["masked_positions"] // chunk, batch["masked_positions"] % chunk
        low, high = where == rank, where == 2 * size - 1 - rank
        out["masked_positions"] = torch.where(low, within, torch.where(high, within + chunk, 0))
        out["labels"] = torch.where(low | high, batch["labels"], IGNORE_INDEX)
        if rank:
            out["next_sentence_labels"] = torch.full_like(batch["next_sentence_labels"], IGNORE_INDEX)
    return out


def padding_free_micro_batches(batch: Batch, micro_batch: int) -> list[Batch]:
    """Micro batches of `size` samples without their padding: all tokens in one row, `starts` says where samples begin.

    Samples are dealt out by length, so that micro batches have about as many tokens: which sample is in which changes
    no number. The row's length is a multiple of ROUND, filled up with tokens that no sample has.
    """
    used = batch["attention_mask"].bool()
    lengths = used.sum(1)
    count = len(lengths) // micro_batch
    order = lengths.argsort(descending=True, stable=True).view(micro_batch, count)
    order[1::2] = order[1::2].flip(1)  # the longest of a round goes where the shortest of the round before went
    return [_remove_padding({name: tensor[rows] for name, tensor in batch.items()}) for rows in order.unbind(1)]


def _remove_padding(batch: Batch) -> Batch:
    used = batch["attention_mask"].bool()
    starts = torch.zeros(len(used) + 1, dtype=torch.int32)
    starts[1:] = used.sum(1).cumsum(0)
    total = int(starts[-1])
    length = -(-total // PACKED_LENGTH_MULTIPLE) * PACKED_LENGTH_MULTIPLE

    def row(values: Tensor) -> Tensor:
        out = torch.zeros(1, length, dtype=torch.int32)
        out[0, :total] = values[used]
        return out

    positions = torch.arange(used.shape[1], dtype=torch.int32).expand(used.shape)
    place = used.cumsum(1, dtype=torch.int32) - 1  # among the tokens of its sample that are left
    places = starts[:-1, None] + place.gather(1, batch["masked_positions"].long())
    return {
        "tokens": row(batch["tokens"]),
        "segment_ids": row(batch["segment_ids"]),
        "position_ids": row(positions),
        "sample_ids": row(batch["sample_ids"][:, None].expand(used.shape)),
        "cu_seqlens": starts,
        "masked_positions": places.view(1, -1),
        "labels": batch["labels"],
        "next_sentence_labels": batch["next_sentence_labels"],
    }


def split_micro_batches(batch: Batch, micro_batch: int) -> Iterator[Batch]:
    total = len(batch["sample_ids"])
    for first in range(0, total, micro_batch):
        yield {name: tensor[first : first + micro_batch] for name, tensor in batch.items()}

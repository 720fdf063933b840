"""Divides a global batch: samples over data-parallel ranks, tokens over context-parallel ranks, micro batches."""

from operator import itemgetter
from typing import cast

import torch
from torch import Tensor

from trainyard.core.batch import Batch, batch_tensors, map_batch
from trainyard.core.constants import IGNORE_INDEX

PACKED_LENGTH_MULTIPLE = 512
"""The length of a micro batch without padding is a multiple of this."""
TOKEN_FIELDS = ("tokens", "segment_ids", "attention_mask", "position_ids", "document_ids")
"""Batch fields with a value per token. `labels` is one too, unless `masked_positions` locates them."""
SAMPLE_FIELDS = ("sample_ids", "pair_keys", "margins", "answer_labels")
"""Batch fields of samples, which context-parallel ranks do not split."""


def rank_samples(global_batch: int, ranks: int, rank: int) -> slice:
    """The samples of a global batch that data-parallel rank `rank` of `ranks` processes."""
    samples = global_batch // ranks
    return slice(rank * samples, (rank + 1) * samples)


def context_parallel_shard(batch: Batch, size: int, rank: int) -> Batch:
    """The tokens of context-parallel rank `rank`: chunks `rank` and 2 size - 1 - rank of 2 size, to balance causal
    attention."""
    if size == 1:
        return batch
    chunk = batch["tokens"].shape[1] // (2 * size)
    names = TOKEN_FIELDS if "masked_positions" in batch else (*TOKEN_FIELDS, "labels")
    names = (*names, *(f"kl_{name}" for name in names))
    tensors, out = batch_tensors(batch), dict(batch_tensors(batch))
    for name in names:
        if name in tensors:
            chunks = tensors[name].chunk(2 * size, 1)
            out[name] = torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), 1)
    if rank and "pair_keys" in batch:
        out["pair_keys"] = torch.zeros_like(batch["pair_keys"])  # the rank of the first token counts pairs
    if "masked_positions" in batch:
        # Labels at positions of other ranks are ignored here; the shape stays. The rank of the first token has the
        # next-sentence label.
        owner_chunk, offset = batch["masked_positions"] // chunk, batch["masked_positions"] % chunk
        low, high = owner_chunk == rank, owner_chunk == 2 * size - 1 - rank
        out["masked_positions"] = torch.where(low, offset, torch.where(high, offset + chunk, 0))
        out["labels"] = torch.where(low | high, batch["labels"], IGNORE_INDEX)
        if rank:
            out["next_sentence_labels"] = torch.full_like(batch["next_sentence_labels"], IGNORE_INDEX)
    return cast(Batch, out)


def count_documents(batch: Batch, micro_batch: int) -> int:
    """The number of documents that no `micro_batch` samples exceed, a power of two so that few graphs depend on it; 0
    if there are none, or if the batch is not in host memory."""
    tensors = batch_tensors(batch)
    fields = [tensors[name] for name in ("document_ids", "kl_document_ids") if name in tensors]
    if not fields or any(type(each) is not Tensor or not each.is_cpu for each in fields):
        return 0
    counts = torch.stack([(each[:, 1:] != each[:, :-1]).sum(1) + 1 for each in fields])
    most = max(int(part.sum(1).max()) for part in torch.split(counts, micro_batch, 1))
    return 1 << (most - 1).bit_length()


def padding_free_micro_batches(batch: Batch, micro_batch: int) -> list[Batch]:
    """Micro batches of `micro_batch` samples without padding: all tokens in one row, samples start at `cu_seqlens`.

    Samples are distributed by length, so that micro batches have similar numbers of tokens; which micro batch a sample
    is in changes no result. Rows are filled up to PACKED_LENGTH_MULTIPLE with tokens that belong to no sample.
    """
    is_token = batch["attention_mask"].bool()
    lengths = is_token.sum(1)
    count = len(lengths) // micro_batch
    order = lengths.argsort(descending=True, stable=True).view(micro_batch, count)
    order[1::2] = order[1::2].flip(1)  # alternate the direction, so that totals even out
    return [_remove_padding(map_batch(itemgetter(samples), batch)) for samples in order.unbind(1)]


def _remove_padding(batch: Batch) -> Batch:
    is_token = batch["attention_mask"].bool()
    starts = torch.zeros(len(is_token) + 1, dtype=torch.int32)
    starts[1:] = is_token.sum(1).cumsum(0)
    total = int(starts[-1])
    length = -(-total // PACKED_LENGTH_MULTIPLE) * PACKED_LENGTH_MULTIPLE

    def concatenate(values: Tensor) -> Tensor:
        out = torch.zeros(1, length, dtype=torch.int32)
        out[0, :total] = values[is_token]
        return out

    positions = torch.arange(is_token.shape[1], dtype=torch.int32).expand(is_token.shape)
    index_in_sample = is_token.cumsum(1, dtype=torch.int32) - 1  # counts tokens only, not padding
    masked_positions = starts[:-1, None] + index_in_sample.gather(1, batch["masked_positions"].long())
    return {
        "tokens": concatenate(batch["tokens"]),
        "segment_ids": concatenate(batch["segment_ids"]),
        "position_ids": concatenate(positions),
        "sample_ids": concatenate(batch["sample_ids"][:, None].expand(is_token.shape)),
        "cu_seqlens": starts,
        "masked_positions": masked_positions.view(1, -1),
        "labels": batch["labels"],
        "next_sentence_labels": batch["next_sentence_labels"],
    }


def split_micro_batches(batch: Batch, micro_batch: int) -> list[Batch]:
    """Micro batches of `micro_batch` samples."""
    starts = range(0, len(batch["sample_ids"]), micro_batch)
    return [map_batch(itemgetter(slice(start, start + micro_batch)), batch) for start in starts]

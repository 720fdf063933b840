"""The shapes of a micro batch, from the fields that a family's samples have."""

from dataclasses import dataclass
from math import prod
from typing import cast

import torch

from trainyard.core.batch import Batch
from trainyard.models import Family
from trainyard.train.micro_batches.split import TOKEN_FIELDS

BYTES_PER_INTEGER = 4


@dataclass(frozen=True)
class MicroBatchShape:
    """A micro batch on one rank."""

    samples: int
    seq_len: int
    """Tokens of a sample, on one context-parallel rank."""
    packed_tokens: int | None
    """Tokens of all samples, if their padding is removed."""
    predictions: int
    """Masked positions of a sample, for families that have them."""
    document_ids: bool

    def field_shapes(self, family: Family, packed: bool) -> dict[str, tuple[int, ...]]:
        """Shapes of the fields that samples have, with or without their padding."""
        tokens = self.packed_tokens if packed else None
        per_token = (self.samples, self.seq_len) if tokens is None else (1, tokens)
        shapes: dict[str, tuple[int, ...]] = {"sample_ids": (self.samples,)}
        for name in family.batch_fields:
            if name in TOKEN_FIELDS or (name == "labels" and not family.has_masked_positions):
                shapes[name] = per_token
            else:
                is_prediction = name in ("labels", "masked_positions")
                shapes[name] = (self.samples, self.predictions) if is_prediction else (self.samples,)
        if self.document_ids:
            shapes |= {"document_ids": per_token, "position_ids": per_token}
        if tokens is not None:
            shapes |= {"sample_ids": per_token, "position_ids": per_token, "cu_seqlens": (self.samples + 1,)}
            shapes["masked_positions"] = (1, self.samples * self.predictions)
            del shapes["attention_mask"]
        return shapes

    def full_bytes(self, family: Family) -> int:
        """Bytes of the micro batch with its padding."""
        return BYTES_PER_INTEGER * sum(map(prod, self.field_shapes(family, packed=False).values()))

    def meta_batch(self, family: Family) -> Batch:
        """The micro batch that a model receives, without memory."""
        shapes = self.field_shapes(family, packed=True) | {"rng_key": (2,)}
        tensors = {name: torch.empty(size, dtype=torch.int32, device="meta") for name, size in shapes.items()}
        return cast(Batch, tensors)

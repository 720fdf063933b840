"""Muon: momentum that is orthogonalized, for the matrices of blocks (Keller Jordan,
https://kellerjordan.github.io/posts/muon; torch.optim.Muon); AdamW for everything else."""

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from trainyard.core.constants import DTYPE_BYTES
from trainyard.core.section import Section
from trainyard.train.optim.rules.adamw import AdamW
from trainyard.train.optim.update_rule import UpdateMessage, UpdateShape

if TYPE_CHECKING:
    from trainyard.families.blueprint import ParamSpec
    from trainyard.parallel.flat_buffer import Bucket


class MuonKeys(Section):
    momentum: float = Field(0.95, ge=0, lt=1)
    """muon: decay rate of the momentum, 0 to below 1."""
    nesterov: bool = True
    """muon: use Nesterov momentum."""
    ns_steps: int = Field(5, ge=1, le=20)
    """muon: Newton-Schulz iterations, in the compute dtype."""
    lr_adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """muon: factor on the learning rate of a matrix. match_rms_adamw: 0.2 sqrt(max(rows, columns)), so that values of
    lr and weight_decay for adamw fit; original: sqrt(max(1, rows / columns))."""
    adamw_lr: float | None = Field(None, gt=0)
    """muon: peak learning rate of the parameters that adamw updates; it follows the schedule of optimizer.lr. Default:
    optimizer.lr."""


class Muon(AdamW):
    """The update of a matrix is lr times a shape factor times its orthogonalized momentum."""

    keys = MuonKeys
    implementation = "trainyard.train.optim.updates.muon:MuonUpdate"
    missing_state = "second moment for the matrices that muon has updated"

    def __init__(self, **keys: Any) -> None:
        self.options = MuonKeys(**keys)

    def state_of(self, spec: "ParamSpec") -> tuple[str, ...]:
        """A matrix has a momentum and no second moment."""
        is_matrix = spec.pipeline_stage == "block" and len(spec.shape) == 2
        return ("exp_avg",) if is_matrix else self.state_names

    def workspace_bytes(self, shape: UpdateShape) -> int:
        """AdamW's, the matrices that a rank orthogonalizes and their results, one gathered bucket, and the temporaries
        of the largest matrix."""
        adamw, buckets = super().workspace_bytes(shape), _matrix_buckets(shape)
        if not buckets:
            return adamw
        tp, ep = shape.layout.tp, shape.layout.ep
        spans = [span for bucket in buckets for span in bucket.spans]
        owned = 2 * sum(prod(span.shape) // span.num_shards for span in spans)
        gathered = 2 * tp * max(bucket.padded_elements * (ep if bucket.of_experts else 1) for bucket in buckets)
        largest = 3 * tp * max(prod(span.shape) * (ep if span.of_experts else 1) for span in spans)
        return adamw + DTYPE_BYTES[shape.precision.compute_dtype] * (owned + max(gathered, largest))

    def messages(self, shape: UpdateShape) -> Iterator[UpdateMessage]:
        """The matrices of each bucket are gathered over ZeRO shards, tensor-parallel and expert-parallel ranks; the
        shards are returned."""
        tp = shape.layout.tp
        for bucket in _matrix_buckets(shape):
            experts, size = bucket.of_experts, bucket.padded_elements
            ep = shape.layout.ep if experts else 1
            for kind in ("all_gather", "reduce_scatter"):
                if experts:
                    yield UpdateMessage("ep", kind, ep * tp * size, experts)
                yield UpdateMessage("tp", kind, tp * size, experts)
                if bucket.num_shards > 1:
                    yield UpdateMessage("data", kind, size, experts)
            if bucket.num_shards == 1:
                yield UpdateMessage("data", "all_reduce", size, experts)


def _matrix_buckets(shape: UpdateShape) -> "list[Bucket]":
    return [bucket for bucket in shape.flat.buckets if bucket.shard_range.start >= shape.flat.shard_undecayed_end]


RULE = Muon

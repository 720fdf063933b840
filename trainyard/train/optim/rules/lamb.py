"""LAMB: Adam with a trust ratio for every matrix, for very large batches (You et al., arXiv 1904.00962)."""

from typing import Any

from trainyard.core.section import Section
from trainyard.train.optim.update_rule import ADAM_STATE, UPDATE_BYTES_PER_WEIGHT, UpdateRule, UpdateShape


class LambKeys(Section):
    trust_clip: bool = False
    """lamb: limit the trust ratio to at most 1."""


class Lamb(UpdateRule):
    """Scales each matrix's update to lr times the matrix's norm. Parameters without weight decay get plain Adam."""

    state_names = ADAM_STATE
    keys = LambKeys
    implementation = "trainyard.train.optim.updates.lamb:LambUpdate"
    norms_per_parameter = 3  # of its gradient, of itself and of its update
    passes = 2

    def __init__(self, **keys: Any) -> None:
        self.options = LambKeys(**keys)

    def workspace_bytes(self, shape: UpdateShape) -> int:
        """All updates, and with bf16 weights also their fp32 values, exist before the first is applied."""
        bytes_per_weight = 8 if shape.precision.kind == "bf16_sr" else 4
        return shape.flat.shard_undecayed_end * bytes_per_weight + UPDATE_BYTES_PER_WEIGHT * shape.largest_parameter


RULE = Lamb

"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

from trainyard.train.optim.update_rule import (
    ADAM_STATE,
    ROUNDED_UPDATE_BYTES_PER_WEIGHT,
    UPDATE_BYTES_PER_WEIGHT,
    UpdateRule,
    UpdateShape,
)


class AdamW(UpdateRule):
    """Its keys are those of the `optimizer` section that every rule may read."""

    state_names = ADAM_STATE
    implementation = "trainyard.train.optim.updates.adamw:AdamWUpdate"

    def workspace_bytes(self, shape: UpdateShape) -> int:
        """Temporary memory of an update; none where one kernel does it all."""
        precision = shape.precision
        if shape.has_fused_kernels:
            return 0
        if precision.kind == "bf16_sr":
            return ROUNDED_UPDATE_BYTES_PER_WEIGHT * shape.largest_parameter
        # torch's fused kernel supports no bf16 gradients; under fully_shard they have the dtype of the weights.
        if precision.grad_accum_dtype == "bf16" and not shape.is_sharded_model:
            return UPDATE_BYTES_PER_WEIGHT * max(shape.decayed, shape.undecayed)
        return 0


RULE = AdamW

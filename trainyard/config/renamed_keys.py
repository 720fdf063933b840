"""Keys of early versions under their present names.

A configuration with an old key is an error that names the new one. The configuration inside a saved checkpoint is
upgraded instead, so that old checkpoints stay readable.
"""

from typing import Any

RENAMED_KEYS: dict[str, str] = {
    "needs": "hardware",
    "model.tied": "model.tie_embeddings",
    "model.rope_scaling.low_frequency": "model.rope_scaling.low_freq_factor",
    "model.rope_scaling.high_frequency": "model.rope_scaling.high_freq_factor",
    "model.rope_scaling.original_positions": "model.rope_scaling.original_max_positions",
    "data.sequence": "data.seq_len",
    "data.separate": "data.document_mask",
    "data.mask_ends": "data.mask_eod_loss",
    "data.predictions": "data.max_predictions",
    "data.validation": "data.validation_fraction",
    "train.max_skipped": "train.max_skipped_steps",
    "optimizer.clip": "optimizer.max_grad_norm",
    "schedule.warmup": "schedule.warmup_steps",
    "schedule.floor": "schedule.min_lr",
    "precision.gradients": "precision.grad_dtype",
    "precision.reduce": "precision.reduce_dtype",
    "precision.scaling": "precision.fp8_scaling",
    "precision.backward": "precision.fp8_backward",
    "precision.bf16_first": "precision.bf16_first_layers",
    "precision.bf16_last": "precision.bf16_last_layers",
    "precision.head": "precision.head_dtype",
    "layout.cuts": "layout.pipeline_cuts",
    "layout.schedule": "layout.pipeline_schedule",
    "layout.context": "layout.cp_method",
    "layout.bucket": "layout.bucket_mib",
    "recompute.parts": "recompute.modules",
    "compile.replay": "compile.cuda_graphs",
    "checkpoint.minutes": "checkpoint.every_minutes",
    "checkpoint.start": "checkpoint.init_from",
    "checkpoint.window": "checkpoint.writers_per_host",
    "checkpoint.final": "checkpoint.export_hf",
    "log.tensorboard": "log.loggers",
}
RENAMED_VALUES: dict[str, dict[str, str]] = {"recompute.kind": {"parts": "selective"}}
NEW_VALUES: dict[str, dict[bool, list[str]]] = {"log.tensorboard": {True: ["tensorboard"], False: []}}
"""Values of a renamed key whose type has changed, by its old name and value."""


def upgrade_keys(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a saved configuration with old keys and values renamed."""
    upgraded: dict[str, Any] = {}
    for name, value in data.items():
        key = RENAMED_KEYS.get(prefix + name, prefix + name)
        if isinstance(value, dict):
            value = upgrade_keys(value, f"{key}.")
        elif isinstance(value, bool):
            value = NEW_VALUES.get(prefix + name, {}).get(value, value)
        elif isinstance(value, str):
            value = RENAMED_VALUES.get(key, {}).get(value, value)
        upgraded[key.rsplit(".", 1)[-1]] = value
    return upgraded

"""The configuration of an evaluation: the model of a checkpoint, defaults for one pass without training, overrides."""

from collections.abc import Iterable
from typing import Any

from trainyard.checkpoint.formats.tensor_map import WeightSource
from trainyard.checkpoint.native.checkpoint import Checkpoint
from trainyard.config.load import apply_overrides, parse
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.families import family_of

MAX_DEFAULT_SEQ_LEN = 2048
"""Longest default window of a checkpoint that does not tell the seq_len it was trained with."""
DEFAULT_MICRO_BATCH = 4
DATA_KEYS = ("seq_len", "document_mask", "mask_eod_loss", "tokenizer", "vocab_file", "merges_file", "end_of_text")
"""Keys of the data section that have a meaning for an evaluation."""
EVALUATE_KEYS = ("metrics",)


def evaluation_config(weights: WeightSource, overrides: Iterable[str], ranks: int) -> Config:
    """The configuration of an evaluation of `weights` on `ranks` ranks, in fp32 unless an override says otherwise.

    Model and window come from the checkpoint; nothing else of the run that wrote it does. The global batch fills the
    ranks: it has no influence on the result.
    """
    overrides = list(overrides)
    for override in overrides:
        _check_key(override)
    model = weights.model.model_dump(mode="json")
    is_masked = not family_of(weights.model).is_causal
    data: dict[str, Any] = {
        "model": model,
        "data": {"source": "synthetic" if is_masked else "text", "seq_len": default_seq_len(weights)},
        "train": {"steps": 1, "micro_batch": DEFAULT_MICRO_BATCH},
    }
    if is_masked:
        data["data"]["max_predictions"] = max(1, min(20, data["data"]["seq_len"] - 3))
    keys = apply_overrides(data, overrides)
    if "train.global_batch" not in keys:
        tp, pp, cp = (_positive(data.get("layout", {}).get(axis)) for axis in ("tp", "pp", "cp"))
        dp = max(ranks // (tp * pp * cp), 1)
        data["train"]["global_batch"] = _positive(data["train"]["micro_batch"]) * dp * (2 * pp if pp > 1 else 1)
    config = parse(data)
    if config.layout.zero:
        raise UserError(
            f"layout.zero={config.layout.zero}: an evaluation has no optimizer state or gradients to shard; nearest: 0"
        )
    return config


def with_sample_shape(config: Config, seq_len: int, max_predictions: int | None = None) -> Config:
    """The same evaluation on samples of another shape."""
    data = config.model_dump(mode="json")
    data["data"] |= {"seq_len": seq_len} | ({"max_predictions": max_predictions} if max_predictions else {})
    return parse(data)


def default_seq_len(weights: WeightSource) -> int:
    if isinstance(weights, Checkpoint):
        return weights.config.data.seq_len
    return min(weights.model.max_positions, MAX_DEFAULT_SEQ_LEN)


def _check_key(override: str) -> None:
    section, _, key = override.partition("=")[0].partition(".")
    for name, allowed in (("data", DATA_KEYS), ("evaluate", EVALUATE_KEYS)):
        if section == name and key.partition(".")[0] not in allowed:
            raise UserError(
                f"{override}: an evaluation reads all of DATA in order; of the section {name} it takes "
                f"{', '.join(allowed)}"
            )


def _positive(value: Any) -> int:
    """A size from data that is not validated yet."""
    return value if isinstance(value, int) and value > 0 else 1

"""Data and evaluation of an NxDT file: packed directories of the datasets library, or Megatron's .bin and .idx."""

from typing import Any

from trainyard.config.importers.key_table import ConfigKeys, parse_blend, positive_number
from trainyard.config.yaml_io import format_value
from trainyard.core.errors import UserError

NxdtKeys = dict[str, Any]
DEFAULT_SPLIT = "980,10,10"
"""The split in NxDT's examples and documentation."""


def data_keys(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    """Return our keys of data and evaluate."""
    seq_len, data_seq_len = keys.get("model.encoder_seq_length"), keys.get("data.seq_length")
    if seq_len is None or (data_seq_len is not None and data_seq_len != seq_len):
        raise UserError(
            f"model.encoder_seq_length={format_value(seq_len)}: required, and must equal "
            f"data.seq_length={format_value(data_seq_len)}"
        )
    window = keys.get("model.sliding_window_size")
    if window and window < seq_len:
        raise UserError(
            f"model.sliding_window_size={window}: attention covers the full sequence here; nearest: {seq_len} or more, "
            "which has no effect"
        )
    config_keys: ConfigKeys = {"data.seq_len": seq_len}
    if keys.get("data.data_prefix") is not None:
        config_keys |= _megatron_data(keys, warnings)
    elif path := keys.get("data.train_dir"):
        if path.endswith((".json", ".jsonl")):
            raise UserError(
                f"data.train_dir={format_value(path)}: prompt and answer records: only pre-training is supported; "
                "nearest: a directory written by trainyard data pack"
            )
        config_keys |= {"data.source": "arrow", "data.paths": [path]}
    else:
        raise UserError("data.train_dir: missing; needed: a packed directory, or data.data_prefix for .bin and .idx")
    return config_keys | _evaluation(keys, config_keys.get("data.split"), warnings)


def _megatron_data(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    prefix = keys["data.data_prefix"]
    split: str | None = str(keys.get("data.splits_string") or DEFAULT_SPLIT).replace(" ", "").strip("[]()")
    if isinstance(prefix, dict):
        split = None
        if any(prefix.get(name) for name in ("validation", "test")):
            warnings.append(
                "data.data_prefix: separate validation and test sets are not supported; no samples are held out"
            )
        prefix = prefix.get("train")
    paths, weights = parse_blend([prefix] if isinstance(prefix, str) else prefix, "data.data_prefix")
    resets = [bool(keys.get(f"data.reset_{name}")) for name in ("position_ids", "attention_mask")]
    if any(resets) and not all(resets):
        raise UserError(
            "data.reset_position_ids and data.reset_attention_mask: supported only together (data.document_mask); "
            "nearest: both"
        )
    loader = keys.get("data.dataloader_type") or "single"
    if loader not in ("single", "cyclic"):
        raise UserError(f"data.dataloader_type={loader}: not one of single, cyclic; nearest: single")
    return {
        "data.source": "tokens",
        "data.paths": paths,
        "data.weights": weights,
        "data.order": "megatron" if loader == "single" and (weights or len(paths) == 1) else "shuffled",
        "data.split": split,
        "data.document_mask": all(resets),
        "data.mask_eod_loss": bool(keys.get("data.eod_mask_loss")),
        **_tokenizer(keys),
    }


def _tokenizer(keys: NxdtKeys) -> ConfigKeys:
    kind, model = keys.get("data.tokenizer.type"), keys.get("data.tokenizer.model")
    vocab_file, merges_file = keys.get("data.tokenizer.vocab_file"), keys.get("data.tokenizer.merge_file")
    if kind == "GPT2BPETokenizer":
        files = {"data.vocab_file": vocab_file, "data.merges_file": merges_file}
        return {"data.tokenizer": "gpt2", **files} if vocab_file and merges_file else {}
    return {"data.tokenizer": model or kind} if model or kind else {}


def _evaluation(keys: NxdtKeys, split: str | None, warnings: list[str]) -> ConfigKeys:
    every, batches = keys.get("trainer.val_check_interval") or 0, keys.get("trainer.limit_val_batches")
    if not every or batches in (0, None) or every > (keys.get("trainer.max_steps") or 0):
        return {"evaluate.every": 0}
    held_out = split is not None and len(split.split(",")) > 1 and bool(positive_number(split.split(",")[1]))
    if isinstance(every, float) or isinstance(batches, float) or not held_out:
        reason = "fractions of an epoch are not supported" if held_out else "no samples are held out"
        warnings.append(
            f"trainer.val_check_interval={every}, limit_val_batches={batches}: no evaluation, because {reason}; see "
            "data.validation_fraction, evaluate.every, evaluate.batches"
        )
        return {"evaluate.every": 0}
    return {"evaluate.every": every, "evaluate.batches": batches}

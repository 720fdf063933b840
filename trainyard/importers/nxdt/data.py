"""Data and evaluation of an NxDT file: packed directories of the datasets library, or Megatron's .bin and .idx."""

from typing import Any

from trainyard.core.errors import UserError
from trainyard.core.yaml_io import format_value
from trainyard.importers.key_table import ConfigKeys, check_choice, positive_number
from trainyard.importers.megatron_semantics import GPT2_TOKENIZER, gpt2_tokenizer, token_data

NxdtKeys = dict[str, Any]
DEFAULT_SPLIT = "980,10,10"
"""The split in NxDT's examples and documentation."""


def data_keys(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    """Return our keys of data and evaluate."""
    seq_len = keys.get("model.encoder_seq_length")
    if seq_len is None or keys.get("data.seq_length", seq_len) != seq_len:
        raise UserError(
            f"model.encoder_seq_length={format_value(seq_len)}: required, and must equal "
            f"data.seq_length={format_value(keys.get('data.seq_length'))}"
        )
    if "data.data_prefix" in keys:
        data = _megatron_data(keys, warnings)
    elif path := keys.get("data.train_dir"):
        if path.endswith((".json", ".jsonl")):
            raise UserError(
                f"data.train_dir={format_value(path)}: prompt and answer records: only pre-training is supported; "
                "nearest: a directory written by trainyard data pack"
            )
        data = {"data.source": "arrow", "data.paths": [path]}
    else:
        raise UserError("data.train_dir: missing; needed: a packed directory, or data.data_prefix for .bin and .idx")
    return {"data.seq_len": seq_len, **data, **_evaluation(keys, data.get("data.split"), warnings)}


def _megatron_data(keys: NxdtKeys, warnings: list[str]) -> ConfigKeys:
    prefix = keys["data.data_prefix"]
    split: str | None = str(keys.get("data.splits_string") or DEFAULT_SPLIT).replace(" ", "").strip("[]()")
    if isinstance(prefix, dict):
        split = None
        if prefix.get("validation") or prefix.get("test"):
            warnings.append(
                "data.data_prefix: separate validation and test sets are not supported; no samples are held out"
            )
        prefix = prefix.get("train")
    loader = keys.get("data.dataloader_type") or "single"
    resets = {name: bool(keys.get(name)) for name in ("data.reset_position_ids", "data.reset_attention_mask")}
    blend = [prefix] if isinstance(prefix, str) else prefix
    data = token_data("data.data_prefix", blend, "megatron-2023", loader == "cyclic", split, resets)
    check_choice("data.dataloader_type", loader, ("single", "cyclic"), "single")
    return data | {"data.mask_eod_loss": bool(keys.get("data.eod_mask_loss")), **_tokenizer(keys)}


def _tokenizer(keys: NxdtKeys) -> ConfigKeys:
    kind = keys.get("data.tokenizer.type")
    if kind == GPT2_TOKENIZER:
        vocab_file, merges_file = keys.get("data.tokenizer.vocab_file"), keys.get("data.tokenizer.merge_file")
        return gpt2_tokenizer(vocab_file, merges_file)
    name = keys.get("data.tokenizer.model") or kind
    return {"data.tokenizer": name} if name else {}


def _evaluation(keys: NxdtKeys, split: str | None, warnings: list[str]) -> ConfigKeys:
    every, batches = keys.get("trainer.val_check_interval", 0), keys.get("trainer.limit_val_batches", 0)
    if not every or not batches or every > keys.get("trainer.max_steps", 0):
        return {"evaluate.every": 0}
    held_out = bool(split and positive_number((*split.split(","), "")[1]))
    if isinstance(every, float) or isinstance(batches, float) or not held_out:
        reason = "fractions of an epoch are not supported" if held_out else "no samples are held out"
        warnings.append(
            f"trainer.val_check_interval={every}, limit_val_batches={batches}: no evaluation, because {reason}; see "
            "data.validation_fraction, evaluate.every, evaluate.batches"
        )
        return {"evaluate.every": 0}
    return {"evaluate.every": every, "evaluate.batches": batches}

"""Data and evaluation of an NxDT file: packed directories of the datasets library, or Megatron's .bin and .idx."""

from typing import Any

from trainyard.config.importers.key_table import format_value
from trainyard.core.errors import UserError

NxdtKeys = dict[str, Any]
DEFAULT_SPLIT = "980,10,10"
"""What their examples and documents have."""


def data_keys(said: NxdtKeys, warn: list[str]) -> dict[str, Any]:
    """Our keys of data and evaluate."""
    sequence, asked = said.get("model.encoder_seq_length"), said.get("data.seq_length")
    if sequence is None or (asked is not None and asked != sequence):
        raise UserError(
            f"model.encoder_seq_length={format_value(sequence)}: wanted, and the same as data.seq_length={format_value(asked)}"
        )
    window = said.get("model.sliding_window_size")
    if window and window < sequence:
        raise UserError(
            f"model.sliding_window_size={window}: attention sees the whole sequence here; nearest: {sequence} or more, "
            "which changes nothing"
        )
    out: dict[str, Any] = {"data.seq_len": sequence}
    if said.get("data.data_prefix") is not None:
        out |= _megatron_data(said, warn)
    elif path := said.get("data.train_dir"):
        if path.endswith((".json", ".jsonl")):
            raise UserError(
                f"data.train_dir={format_value(path)}: records of prompts and answers: only pre-training is done here; "
                "nearest: a directory that trainyard data pack writes"
            )
        out |= {"data.source": "arrow", "data.paths": [path]}
    else:
        raise UserError("data.train_dir: missing; wanted: a packed directory, or data.data_prefix for .bin and .idx")
    return out | _evaluation(said, out.get("data.split"), warn)


def _megatron_data(said: NxdtKeys, warn: list[str]) -> dict[str, Any]:
    given = said["data.data_prefix"]
    split: str | None = str(said.get("data.splits_string") or DEFAULT_SPLIT).replace(" ", "").strip("[]()")
    if isinstance(given, dict):
        split = None
        if any(given.get(name) for name in ("validation", "test")):
            warn.append("data.data_prefix: sets of their own for validation and test are not read; nothing is held out")
        given = given.get("train")
    paths, weights = parse_blend([given] if isinstance(given, str) else given, "data.data_prefix")
    resets = [bool(said.get(f"data.reset_{name}")) for name in ("position_ids", "attention_mask")]
    if any(resets) and not all(resets):
        raise UserError(
            "data.reset_position_ids and data.reset_attention_mask: one without the other is not there; nearest: both, "
            "which is data.document_mask"
        )
    kind = said.get("data.dataloader_type") or "single"
    if kind not in ("single", "cyclic"):
        raise UserError(f"data.dataloader_type={kind}: not one of single, cyclic; nearest: single")
    out: dict[str, Any] = {
        "data.source": "tokens",
        "data.paths": paths,
        "data.weights": weights,
        "data.order": "megatron" if kind == "single" and (weights or len(paths) == 1) else "shuffled",
        "data.split": split,
        "data.document_mask": all(resets),
        "data.mask_eod_loss": bool(said.get("data.eod_mask_loss")),
    }
    return out | _tokenizer(said)


def parse_blend(value: object, key: str) -> tuple[list[str], list[float]]:
    """`[0.3, a, 0.7, b]` or `[a]`: the paths, and their weights where there are several."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{key}={format_value(value)}: not a path, nor weights and paths in turn; nearest: [1.0, PATH]")
    if all(isinstance(each, str) and not _weight(each) for each in value):
        return [str(each) for each in value], []
    weights, paths = [_weight(each) for each in value[::2]], value[1::2]
    if len(value) % 2 or not all(weights) or not all(isinstance(path, str) for path in paths):
        raise UserError(
            f"{key}={format_value(value)}: not weights above 0 and paths in turn; nearest: [0.5, A, 0.5, B]"
        )
    return [str(path) for path in paths], [each for each in weights if each] if len(paths) > 1 else []


def _weight(value: object) -> float | None:
    """A weight; None where it is none."""
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        return None
    return number if 0 < number < 2**53 else None


def _tokenizer(said: NxdtKeys) -> dict[str, Any]:
    kind, model = said.get("data.tokenizer.type"), said.get("data.tokenizer.model")
    words, merges = said.get("data.tokenizer.vocab_file"), said.get("data.tokenizer.merge_file")
    if kind == "GPT2BPETokenizer":
        files = {"data.vocab_file": words, "data.merges_file": merges}
        return {"data.tokenizer": "gpt2", **files} if words and merges else {}
    named = model or kind
    return {"data.tokenizer": named} if named else {}


def _evaluation(said: NxdtKeys, split: str | None, warn: list[str]) -> dict[str, Any]:
    every, batches = said.get("trainer.val_check_interval") or 0, said.get("trainer.limit_val_batches")
    if not every or batches in (0, None) or every > (said.get("trainer.max_steps") or 0):
        return {"evaluate.every": 0}
    held_out = split is not None and len(split.split(",")) > 1 and bool(_weight(split.split(",")[1]))
    if isinstance(every, float) or isinstance(batches, float) or not held_out:
        warn.append(
            f"trainer.val_check_interval={every}, limit_val_batches={batches}: no evaluation, "
            + ("for parts of an epoch are not counted here" if held_out else "for nothing is held out")
            + "; see data.validation_fraction, evaluate.every, evaluate.batches"
        )
        return {"evaluate.every": 0}
    return {"evaluate.every": every, "evaluate.batches": batches}

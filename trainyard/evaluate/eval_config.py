"""The configuration of an evaluation: what the run of a checkpoint says, defaults for one pass without training, and
overrides."""

from collections.abc import Iterable, Mapping
from typing import Any

from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.checkpoint.weights import WeightSource
from trainyard.config.load import apply_overrides, parse
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.core.user_code import load_object
from trainyard.families import family_of
from trainyard.formats.registry import AddedParameters

MAX_DEFAULT_SEQ_LEN = 2048
"""Longest default window of a checkpoint that does not tell the seq_len it was trained with."""
DEFAULT_MICRO_BATCH = 4
DATA_KEYS = ("seq_len", "document_mask", "mask_eod_loss", "tokenizer", "vocab_file", "merges_file", "end_of_text")
"""Keys of the data section that have a meaning for an evaluation."""
EVALUATE_KEYS = ("metrics",)
RUN_KEYS = {"train": ("loss",), "evaluate": ("metrics",), "data": ("document_mask", "mask_eod_loss")}
"""Keys besides model and seq_len that an evaluation takes from the run, which evaluates itself with them."""


def evaluation_config(
    weights: WeightSource, overrides: Iterable[str], ranks: int, run_keys: Mapping[str, Any] | None = None
) -> Config:
    """The configuration of an evaluation of `weights` on `ranks` ranks, in fp32 unless an override says otherwise.

    Model, window and `run_keys` (default: those of `keys_of_run`) come from the checkpoint; nothing else of the run
    that wrote it does. The global batch fills the ranks: it has no influence on the result.
    """
    overrides = list(overrides)
    for override in overrides:
        _check_key(override)
    model = weights.model.model_dump(mode="json")
    if weights.model.score_head:
        raise UserError("a reward model predicts no tokens; nearest: evaluate.every in the run that trains it")
    is_masked = not family_of(weights.model).is_causal
    data: dict[str, Any] = {
        "model": model,
        "data": {"source": "synthetic" if is_masked else "text", "seq_len": default_seq_len(weights)},
        "train": {"steps": 1, "micro_batch": DEFAULT_MICRO_BATCH},
    }
    if is_masked:
        data["data"]["max_predictions"] = max(1, min(20, data["data"]["seq_len"] - 3))
    given = {override.partition("=")[0] for override in overrides}
    for key, value in (keys_of_run(weights) if run_keys is None else run_keys).items():
        if key not in given:
            _check_imports(key, value)
            section, _, name = key.partition(".")
            data.setdefault(section, {})[name] = value
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


def keys_of_run(weights: WeightSource) -> dict[str, Any]:
    """The values of RUN_KEYS that a run has set; empty for weights of another format."""
    run = config_of_run(weights)
    if run is None:
        return {}
    sections = {name: getattr(run, name).model_dump(mode="json") for name in RUN_KEYS}
    return {
        f"{name}.{key}": sections[name][key] for name, keys in RUN_KEYS.items() for key in keys if sections[name][key]
    }


def notes_of_run(weights: WeightSource, keys: Mapping[str, Any], overrides: Iterable[str]) -> list[str]:
    """What the evaluation takes from the run, unless an override replaces it, and what it cannot take."""
    run, given = config_of_run(weights), {override.partition("=")[0] for override in overrides}
    found = keys_of_run(weights)
    taken = ", ".join(f"{key}={value}" for key, value in found.items() if key in keys and key not in given)
    left = [f"{key}={value}" for key, value in found.items() if key not in keys]
    left += [f"evaluate.function={run.evaluate.function}"] if run and run.evaluate.function else []
    lines = [f"as in the run: {taken}"] if taken else []
    return lines + ([f"unlike in the run, without {', '.join(left)}"] if left else [])


def config_of_run(weights: WeightSource) -> Config | None:
    """The configuration of the run that wrote a checkpoint; None for weights of another format."""
    weights = weights.weights if isinstance(weights, AddedParameters) else weights
    return weights.config if isinstance(weights, Checkpoint) else None


def default_seq_len(weights: WeightSource) -> int:
    if run := config_of_run(weights):
        return run.data.seq_len
    return min(weights.model.max_positions, MAX_DEFAULT_SEQ_LEN)


def _check_key(override: str) -> None:
    section, _, key = override.partition("=")[0].partition(".")
    for name, allowed in (("data", DATA_KEYS), ("evaluate", EVALUATE_KEYS)):
        if section == name and key.partition(".")[0] not in allowed:
            raise UserError(
                f"{override}: an evaluation reads all of DATA in order; of the section {name} it takes "
                f"{', '.join(allowed)}"
            )


def _check_imports(key: str, value: Any) -> None:
    """Import the functions that a run names, from installed packages and PYTHONPATH only: in the current directory, a
    checkpoint that somebody else wrote could name any file."""
    paths = value if isinstance(value, dict) else {"": value} if isinstance(value, str) else {}
    for name, path in paths.items():
        assignment = f"{key}{'.' * bool(name)}{name}={path}"
        try:
            load_object(path, "a function")
        except UserError as error:
            reset = f"{key}={'{}' if name else 'null'}"
            raise UserError(
                f"{assignment}: of the run, but not in installed packages or PYTHONPATH: "
                f"{str(error).partition(';')[0]}; nearest: give {assignment} again, or {reset}"
            ) from None


def _positive(value: Any) -> int:
    """A size from data that is not validated yet."""
    return value if isinstance(value, int) and value > 0 else 1

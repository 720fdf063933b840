"""The configuration of a run, from a file or recipe, overrides and `--smoke`."""

import json
from collections.abc import Callable

from trainyard.config.load import load, parse, warn_on_stderr
from trainyard.config.schema import Config
from trainyard.config.smoke import smoke_config
from trainyard.core.user_code import is_user_path
from trainyard.download.local_copies import is_remote_model
from trainyard.families import ModelConfig
from trainyard.families.hf_config import from_hf


def load_run_config(
    source: str, overrides: list[str], smoke: bool, ranks: int, warn: Callable[[str], None] | None = None
) -> Config:
    """Load the configuration of a run on `ranks` ranks, and warn of what it probably does not mean."""
    config = _load_smoke(source, overrides, ranks, warn) if smoke else load(source, overrides, warn)
    schedule, steps = config.schedule, config.train.steps
    if schedule.warmup_steps > steps and not is_user_path(schedule.kind):
        (warn or warn_on_stderr)(
            f"note: schedule.warmup_steps={schedule.warmup_steps}: the run ends after train.steps={steps}, before the "
            "learning rate has reached optimizer.lr"
        )
    return config


def _load_smoke(source: str, overrides: list[str], ranks: int, warn: Callable[[str], None] | None) -> Config:
    """`--smoke` shrinks what the overrides do not name. A trial that starts from a checkpoint of the command line has
    its model, and a trial on the user's own data has their vocabulary."""
    if (model := _checkpoint_model(overrides)) and not any(item.startswith("model=") for item in overrides):
        overrides = [f"model={json.dumps(model.model_dump(mode='json'))}", *overrides]
    config = smoke_config(load(source, warn=warn), ranks, overrides, warn)
    reads_files = config.data.paths and not is_user_path(config.data.source)
    if not reads_files or any(override.startswith(("model.vocab=", "model=")) for override in overrides):
        return config
    from trainyard.data.loading.vocab import data_vocab_size  # reads data, which other commands need not

    return parse(config.model_dump(mode="json"), [f"model.vocab={data_vocab_size(config)}"])


def _checkpoint_model(overrides: list[str]) -> ModelConfig | None:
    """The model of the checkpoint that overrides name as the start of a run; None if there is none, or none yet."""
    values = dict(override.partition("=")[::2] for override in overrides)
    path = values.get("checkpoint.init_from") or values.get("checkpoint.resume", "none")
    if path in ("auto", "none", "null") or "model.from_hf" in values:
        return None
    try:
        if is_remote_model(path):
            return from_hf(path)
        from trainyard.checkpoint.registry import open_weights  # imports torch

        return open_weights(path).weights.model
    except (ValueError, OSError):  # the run reports it, if it needs the checkpoint
        return None

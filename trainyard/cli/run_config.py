"""The configuration of a run, from a file or recipe, overrides and `--smoke`."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainyard.config.load import load, parse, warn_on_stderr
from trainyard.config.schema import Config
from trainyard.config.smoke import smoke_config
from trainyard.core.errors import UserError
from trainyard.core.user_code import is_user_path
from trainyard.core.yaml_io import read_yaml
from trainyard.families import ModelConfig
from trainyard.families.hf_config import from_hf
from trainyard.importers.key_table import ImportedConfig
from trainyard.importers.nxdt import is_nxdt
from trainyard.remote.local_copies import is_remote_model


def load_run_config(
    source: str, overrides: list[str], smoke: bool, ranks: int, warn: Callable[[str], None] | None = None
) -> Config:
    """Load the configuration of a run on `ranks` ranks, and warn of what it probably does not mean."""
    config = _load_smoke(source, overrides, ranks, warn) if smoke else load_source(source, overrides, warn)
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
    config = _grow_vocab(smoke_config(load_source(source, warn=warn), ranks, overrides, warn))
    reads_files = config.data.paths and not is_user_path(config.data.source)
    if not reads_files or any(override.startswith(("model.vocab=", "model=")) for override in overrides):
        return config
    from trainyard.data.loading.build import data_vocab_size  # reads data, which other commands need not

    vocab = data_vocab_size(config.data)
    return _grow_vocab(parse(config.model_dump(mode="json"), [f"model.vocab={vocab}"])) if vocab else config


def _grow_vocab(config: Config) -> Config:
    """With room for model.new_tokens, so that plans and precompiled graphs are those of the run."""
    if not config.model.new_tokens:
        return config
    from trainyard.data.loading.build import grow_vocab  # imports tokenizers

    return grow_vocab(config)


def _checkpoint_model(overrides: list[str]) -> ModelConfig | None:
    """The model of the checkpoint that overrides name as the start of a run; None if there is none, or none yet."""
    values = dict(override.partition("=")[::2] for override in overrides)
    path = values.get("checkpoint.init_from") or values.get("checkpoint.resume", "none")
    if path in ("auto", "none", "null") or "model.from_hf" in values:
        return None
    try:
        if is_remote_model(path):
            return from_hf(path)
        from trainyard.formats.registry import open_weights  # imports torch

        return open_weights(path).weights.model
    except (ValueError, OSError):  # the run reports it, if it needs the checkpoint
        return None


def load_source(source: str | Path, overrides: Iterable[str] = (), warn: Callable[[str], None] | None = None) -> Config:
    """Load a YAML file or recipe. A file of NxD Training, or one whose base it is, is imported; `warn` (default: print
    to standard error) receives what the import changes."""
    imports: list[ImportedConfig] = []

    def read(path: Path, name: str) -> dict[str, Any]:
        data = read_yaml(path)
        if not is_nxdt(data):
            return data
        from trainyard.importers.nxdt.convert import import_nxdt  # its tables are large; few files need them

        imports.append(import_nxdt(data, name, path.parent))
        note = f"{name}: a file of NxD Training; `trainyard import {name}` shows what its keys become"
        for line in (note, *imports[0].warnings):
            (warn or warn_on_stderr)(f"note: {line}")
        return imports[0].data

    with _missing_hint(imports):
        return _grow_vocab(load(source, overrides, read))


def validate_imported(imported: ImportedConfig, overrides: Iterable[str] = (), source: str = "") -> Config:
    """Validate an imported configuration."""
    with _missing_hint([imported]):
        return parse(imported.data, overrides, source)


@contextmanager
def _missing_hint(imports: list[ImportedConfig]) -> Iterator[None]:
    """The error for a key that an imported file lacks tells where its value usually comes from."""
    try:
        yield
    except UserError as error:
        if ": missing" not in str(error) or not imports or not imports[0].missing_hint:
            raise
        raise UserError(f"{error} ({imports[0].missing_hint})") from None

"""The configuration of a run, from a file or recipe, overrides and `--smoke`."""

from collections.abc import Callable

from trainyard.config.load import load, parse
from trainyard.config.schema import Config
from trainyard.config.smoke import smoke_config
from trainyard.core.user_code import is_user_path


def load_run_config(
    source: str, overrides: list[str], smoke: bool, ranks: int, warn: Callable[[str], None] | None = None
) -> Config:
    """Load the configuration of a run on `ranks` ranks. `--smoke` shrinks what the overrides do not name; a trial on
    the user's own data has their vocabulary."""
    if not smoke:
        return load(source, overrides, warn)
    config = smoke_config(load(source, warn=warn), ranks, overrides, warn)
    reads_files = config.data.paths and not is_user_path(config.data.source)
    if not reads_files or any(override.startswith(("model.vocab=", "model=")) for override in overrides):
        return config
    from trainyard.data.loading.vocab import data_vocab_size  # reads data, which other commands need not

    return parse(config.model_dump(mode="json"), [f"model.vocab={data_vocab_size(config)}"])

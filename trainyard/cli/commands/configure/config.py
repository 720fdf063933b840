"""`trainyard config`: Validate a configuration and print it with all defaults."""

from typing import Annotated

from rich.console import Console
from rich.markup import escape
from typer import Argument, Option

from trainyard.cli.options import CONFIG_SOURCE_HELP, Overrides, Smoke
from trainyard.cli.run_config import load_run_config
from trainyard.config.errors import suggest_key
from trainyard.config.load import dump
from trainyard.config.schema_docs import schema_keys
from trainyard.core.errors import UserError


def config(
    source: Annotated[str | None, Argument(metavar="FILE|RECIPE", help=CONFIG_SOURCE_HELP)] = None,
    overrides: Overrides = None,
    smoke: Smoke = False,
    show_keys: Annotated[
        bool, Option("--keys", help="List every key with its default and meaning, or those that contain a word.")
    ] = False,
) -> None:
    """Validate a configuration and print it with all defaults.

    Examples:

      trainyard config llama2-7b optimizer.lr=1e-4

      trainyard config --keys

      trainyard config --keys warmup
    """
    console = Console(soft_wrap=True, highlight=False)
    if show_keys:
        words = [*([source] if source else []), *(overrides or [])]
        for word in words:
            if not any(word in key.name for key in schema_keys()):
                raise UserError(f"--keys {word}: no key contains it; {suggest_key(word)}")
        for key in schema_keys():
            if words and not any(word in key.name for word in words):
                continue
            console.print(f"[bold]{escape(key.name)}[/]  {escape(key.allowed)}; default: {escape(key.default)}")
            console.print(f"    {key.meaning}", markup=False)
        return
    if source is None:
        raise UserError("config: name a file or a recipe (trainyard recipes lists them), or use --keys")
    console.print(dump(load_run_config(source, overrides or [], smoke, ranks=1)), end="", markup=False)

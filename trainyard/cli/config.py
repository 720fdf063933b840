"""`trainyard config`: the resolved configuration, or every key there is."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from trainyard.config.load import dump, load, schema_keys
from trainyard.config.smoke import smoke_config as shrink
from trainyard.core.errors import UserError


def config(
    source: Annotated[str | None, typer.Argument(metavar="FILE|RECIPE", help="A YAML file or a recipe's name.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Show the small trial of the file instead.")] = False,
    show_keys: Annotated[bool, typer.Option("--keys", help="List every key with its default and meaning.")] = False,
) -> None:
    """Check a configuration and print it whole, defaults included.

    Example: trainyard config llama2-7b optimizer.lr=1e-4
    """
    console = Console(soft_wrap=True, highlight=False)
    if show_keys:
        for each in schema_keys():
            console.print(f"[bold]{escape(each.name)}[/]  {escape(each.allowed)}; default: {escape(each.default)}")
            console.print(f"    {each.meaning}", markup=False)
        return
    if source is None:
        raise UserError("config: name a file or a recipe (trainyard recipes lists them), or use --keys")
    checked = load(source, overrides or [])
    console.print(dump(shrink(checked) if smoke else checked), end="", markup=False)

"""`trainyard data`: from a dump or text to what training reads. One file per verb."""

import typer

app = typer.Typer(help="Prepare data: extract, tokenize, pack, bert, inspect.", no_args_is_help=True)

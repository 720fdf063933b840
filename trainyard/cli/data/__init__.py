"""`trainyard data`: from a dump or text to what training reads. One file per verb."""

import typer

from trainyard.cli.data import bert, extract, inspect, pack, tokenize

app = typer.Typer(
    help="Prepare data: extract, tokenize, pack, bert, inspect.", no_args_is_help=True, add_completion=False
)

app.command("extract")(extract.extract)
app.command("tokenize")(tokenize.tokenize_command)
app.command("pack")(pack.pack)
app.command("bert")(bert.bert)
app.command("inspect")(inspect.inspect)

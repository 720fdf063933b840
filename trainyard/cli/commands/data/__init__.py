"""`trainyard data`: Prepare data: extract, train a tokenizer, tokenize, pack, bert, inspect, show."""

import typer

from trainyard.cli.commands.data import bert, extract, inspect, pack, show, tokenize, train_tokenizer

app = typer.Typer(
    help="Prepare data: extract, train a tokenizer, tokenize, pack, bert, inspect, show.",
    no_args_is_help=True,
    add_completion=False,
)

app.command("extract")(extract.extract)
app.command("train-tokenizer")(train_tokenizer.train_tokenizer)
app.command("tokenize")(tokenize.tokenize)
app.command("pack")(pack.pack)
app.command("bert")(bert.bert)
app.command("inspect")(inspect.inspect)
app.command("show")(show.show)

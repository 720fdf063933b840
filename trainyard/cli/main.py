"""The `trainyard` command: one thin file per verb; user mistakes become one line and exit code 2."""

import sys

import click
import typer

from trainyard.cli import config, recipes, train
from trainyard.errors import RunStopped, UserError

app = typer.Typer(
    help="Pre-train language models on any number of devices from one YAML file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.train)
app.command("config")(config.config)
app.command("recipes")(recipes.recipes)


def main() -> None:
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        _fail(str(error), 2)
    except click.UsageError as error:
        hint = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        _fail(error.format_message() + hint, 2)
    except RunStopped as error:
        _fail(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", 130)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(line: str, code: int) -> None:
    print(f"trainyard: {line}", file=sys.stderr)
    sys.exit(code)

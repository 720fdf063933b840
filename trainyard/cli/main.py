"""The `trainyard` command: one thin file per verb; user mistakes become one line and exit code 2."""

import sys
from typing import Annotated

import typer

from trainyard import __version__
from trainyard.cli import config, recipes, train, tune, verify
from trainyard.errors import RunStopped, UserError
from trainyard.launch.child import attached

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""click's UsageError, whichever click typer was built with."""

app = typer.Typer(
    help="Pre-train language models on any number of devices from one YAML file.",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"trainyard {__version__}")
        raise typer.Exit


app.command("train")(train.train)
app.command("config")(config.config)
app.command("verify")(verify.verify)
app.command("tune")(tune.tune)
app.command("recipes")(recipes.recipes)


def main() -> None:
    try:
        with attached():
            code = _run()
    except UserError as error:
        _fail(str(error), 2)
    except RunStopped as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    else:
        sys.exit(code)


def _run() -> int:
    """The verb's exit code. What click raises becomes what the rest of the tree raises."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except USAGE_ERROR as error:
        raise UserError(f"{error} (see trainyard --help)") from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    return code if isinstance(code, int) else 0


def _fail(line: str, code: int) -> None:
    print(f"trainyard: {line}", file=sys.stderr)
    sys.exit(code)

"""The `trainyard` command: one thin file per verb; user mistakes become one line and exit code 2."""

import errno
import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from trainyard import __version__
from trainyard.core.errors import RunStopped, UserError
from trainyard.launch.rank_guard import rank_process_guard

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""click's UsageError, whichever click typer was built with."""

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""A disk, or what one may have of it."""
COMMAND_HELP = {
    "train": "Train a model. With no argument: a small Llama on a text that trainyard writes itself.",
    "plan": "Whether a run fits, how fast it will be and what it costs, on hardware you may not have.",
    "config": "Check a configuration and print it whole, defaults included.",
    "import": "Bring a configuration of NxD Training or Megatron-LM over, and show what became of every key.",
    "verify": "Train a few steps on several ranks and on one, in fp32, and compare.",
    "tune": "Measure which choices make a file fastest on this machine, and write the file with them.",
    "audit": "Check Trainium's rules on a rehearsed run, at full size and without a Trainium.",
    "precompile": "Compile every graph of a run ahead of time, for any number of ranks, without its memory.",
    "cache": "Look after compiled code: ls, verify, clean, clear-locks, pack, unpack.",
    "data": "Prepare data: extract, tokenize, pack, bert, inspect.",
    "convert": "Bring a checkpoint of any known form to Hugging Face's, NxD's or our own, at any layout.",
    "convert-nxd": "The same with the flags of NxD's checkpoint_converter.py.",
    "recipes": "List the recipes: what each trains, how large it is, what it needs.",
}
"""What each is for. Its file, of the same name, is imported when it is called: help need not wait for torch."""
MODULE_NAMES = {"import": "import_config"}
"""Verbs that Python does not take as a name."""


class CommandInterrupted(Exception):
    """KeyboardInterrupt by another name: typer would make an exit code of it, without a word."""


class LazyCommandGroup(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise CommandInterrupted from None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMAND_HELP)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=COMMAND_HELP[cmd_name]) if cmd_name in COMMAND_HELP else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return (
            (args[0], load_command(args[0]), args[1:])
            if args[0] in COMMAND_HELP
            else super().resolve_command(ctx, args)
        )


def load_command(command: str) -> Any:
    name = MODULE_NAMES.get(command, command.replace("-", "_"))
    module = import_module(f"trainyard.cli.{name}")
    if hasattr(module, "app"):  # a group of verbs
        return get_command(module.app)
    settings = getattr(module, "SETTINGS", {"help_option_names": ["-h", "--help"]})
    alone = typer.Typer(add_completion=False)
    alone.command(command, context_settings=settings)(getattr(module, name))
    return get_command(alone)


app = typer.Typer(
    cls=LazyCommandGroup,
    help="Pre-train language models on any number of devices from one YAML file.",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def global_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"trainyard {__version__}")
        raise typer.Exit


def main() -> None:
    try:
        with rank_process_guard():
            code = _run_command()
    except UserError as error:
        _exit_with_error(str(error), 2)
    except RunStopped as error:
        _exit_with_error(str(error), 1)
    except (CommandInterrupted, KeyboardInterrupt):
        _exit_with_error("interrupted", 130)
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        _exit_with_error(f"{error.filename or 'a file'}: {error.strerror}", 1)
    else:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            # Threads of a process group that outlive the interpreter abort it now and then, all work being done.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        sys.exit(code)


def _run_command() -> int:
    """The verb's exit code. What click raises becomes what the rest of the tree raises."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except USAGE_ERROR as error:
        if not str(error):  # a group without its verb, whose help has been shown
            return 2
        said = error.format_message() if hasattr(error, "format_message") else str(error)
        raise UserError(f"{' '.join(said.split())} (see trainyard --help)") from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    return code if isinstance(code, int) else 0


def _exit_with_error(line: str, code: int) -> None:
    print(f"trainyard: {line}", file=sys.stderr)
    sys.exit(code)

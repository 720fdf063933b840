"""The `trainyard` command: one file per subcommand; a user error becomes one line on stderr and exit code 2."""

import difflib
import errno
import inspect
import os
import re
import sys
import threading
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "true")  # looking for them in all installed packages takes 80 ms

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from trainyard import __version__
from trainyard.config.recipes import recipe_names
from trainyard.core.errors import NotWritable, RunStopped, UserError, is_not_writable
from trainyard.core.user_code import load_object
from trainyard.launch.rank_guard import rank_process_guard

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""click's UsageError; typer may vendor its own click."""

USER_ERRNOS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR)
"""Errors of the operating system that come from the path that the user gave, whoever opens it."""
EXTRA_BY_MODULE = {
    **dict.fromkeys(("pyarrow", "h5py", "sentencepiece"), "data"),
    **dict.fromkeys(("fastapi", "uvicorn", "jinja2"), "serve"),
    "starlette": "page",
    "s3fs": "s3",
    "lm_eval": "lm-eval",
    "wandb": "wandb",
    **dict.fromkeys(("mlflow", "sqlalchemy", "alembic"), "mlflow"),
    "pynvml": "nvidia",
}
"""Optional packages and the extra of trainyard that installs each."""
HELP_ORDER = (
    *("train", "new", "submit", "jobs", "logs", "cancel", "supervise"),
    *("top", "page", "report", "board", "trace", "profile"),
    *("plan", "config", "import", "verify", "tune", "audit", "precompile", "cache"),
    *("get", "data", "eval", "convert", "push", "generate", "fill-mask", "serve", "inspect", "convert-nxd"),
    *("cluster", "doctor", "recipes"),
)
"""Commands in the order of `--help`; others follow."""
COMMANDS_DIRECTORY = Path(__file__).parent / "commands"
HELP_LINE = re.compile(r'"""`trainyard (?P<name>\S+)`: (?P<help>.*?)(?:""")?$')
"""First line of the file of a command. `trainyard --help` reads no further, and imports no file."""
ENTRY_POINT_GROUP = "trainyard.commands"
"""Installed packages offer commands by entry points of this group: `hello = "my_commands.hello:hello"`."""
TYPE_WORDS = {
    **dict.fromkeys(("int", "int range"), "N"),
    **dict.fromkeys(("float", "float range"), "NUMBER"),
    **dict.fromkeys(("str", "list[str]"), "TEXT"),
    **dict.fromkeys(("path", "file", "directory"), "PATH"),
}
"""How help names the value of an option, by typer's name of its type."""


class CommandFile(NamedTuple):
    """The file of a command: a function of the file's name, with its options, or `app`, a group of subcommands."""

    help: str
    module: str


def find_commands() -> dict[str, CommandFile]:
    """The commands of the package by name."""
    found: dict[str, CommandFile] = {}
    for path in COMMANDS_DIRECTORY.rglob("*.py"):
        with path.open(encoding="utf-8") as file:
            match = HELP_LINE.match(file.readline())
        if match:
            parts = path.relative_to(COMMANDS_DIRECTORY).with_suffix("").parts
            module = ".".join(("trainyard.cli.commands", *parts)).removesuffix(".__init__")
            found[match["name"]] = CommandFile(match["help"], module)
    order = {name: index for index, name in enumerate(HELP_ORDER)}
    return {name: found[name] for name in sorted(found, key=lambda name: (order.get(name, len(order)), name))}


COMMANDS = find_commands()


class CommandInterrupted(Exception):
    """Replaces KeyboardInterrupt inside typer, which would turn it into an exit code without a message."""


class LazyCommandGroup(TyperGroup):
    """Command group that lists the commands and imports the module of the one that runs."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise CommandInterrupted from None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_params(self, ctx: Any) -> Any:
        return _with_type_words(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name].help) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        if command := load_command(args[0]):
            return args[0], command, args[1:]
        raise UserError(f"No such command {args[0]!r}; {suggest_command(args)}")


def suggest_command(args: list[str]) -> str:
    """What a command line without a command probably stands for: a file or recipe is one to train."""
    if args[0].endswith((".yaml", ".yml")) or args[0] in recipe_names():
        return " ".join(["nearest: trainyard train", *args])
    close = difflib.get_close_matches(args[0].lower(), COMMANDS, 1)
    return f"nearest: trainyard {close[0]}" if close else "see trainyard --help"


def load_command(name: str) -> Any:
    """Import the module of a command, or of an installed package's, and return its click command; None if there is no
    such command."""
    if name in COMMANDS:
        module = import_module(COMMANDS[name].module)
        command = getattr(module, "app", None) or getattr(module, COMMANDS[name].module.rpartition(".")[2])
    else:  # only then: reading the entry points of all packages takes time
        entry = next(iter(metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)), None)
        if entry is None:
            return None
        command = load_object(f"{entry.module}:{entry.attr}", "a function or a typer.Typer")
        module = import_module(entry.module)
    if isinstance(command, typer.Typer):  # a group of subcommands
        group: Any = get_command(command)
        for subcommand in (group, *getattr(group, "commands", {}).values()):
            _improve_help(subcommand)
        return group
    settings = getattr(module, "CONTEXT_SETTINGS", {"help_option_names": ["-h", "--help"]})
    single = typer.Typer(add_completion=False)
    single.command(name, context_settings=settings)(command)
    loaded = get_command(single)
    _improve_help(loaded)
    return loaded


def _improve_help(command: Any) -> None:
    """Let the help of a command wrap, name types by words, and show brackets that are not markup."""
    command.help = _join_paragraphs(command.help)
    get_params, format_help = command.get_params, command.format_help

    def format_escaped_help(ctx: Any, formatter: Any) -> None:
        from rich.markup import escape

        text = command.help
        command.help = escape(text)
        format_help(ctx, formatter)
        command.help = text

    command.get_params = lambda ctx: _with_type_words(get_params(ctx))
    command.format_help = format_escaped_help


def _with_type_words(parameters: list[Any]) -> list[Any]:
    """The same parameters, whose help has a word of TYPE_WORDS for their type, or nothing for flags and arguments."""
    for parameter in parameters:
        is_option = parameter.param_type_name == "option" and not parameter.is_flag

        def type_word(ctx: Any, parameter: Any = parameter, is_option: bool = is_option) -> str | None:
            name = type(parameter).display_type_rich(parameter, ctx).strip("<>") if is_option else None
            return TYPE_WORDS.get(name, name) if name else None

        parameter.display_type_rich = type_word
    return parameters


def _join_paragraphs(text: str | None) -> str:
    """Put each paragraph of a docstring on one line, so that help wraps at the width of the terminal."""
    return "\n\n".join(
        paragraph if paragraph.startswith(" ") else " ".join(paragraph.split())
        for paragraph in inspect.cleandoc(text or "").split("\n\n")
    )


app = typer.Typer(
    cls=LazyCommandGroup,
    help="Pre-train language models on any number of devices from one YAML file.",
    epilog="Start with: trainyard train. Details: trainyard COMMAND --help.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"trainyard {__version__}")
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    threading.excepthook = _on_thread_error
    try:
        with rank_process_guard():
            code = _run_command()
    except UserError as error:
        _exit_with_error(str(error), 2)
    except RunStopped as error:
        _exit_with_error(str(error), 1)
    except (CommandInterrupted, KeyboardInterrupt):
        _exit_with_error("interrupted", 130)
    else:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            # Process group threads that outlive the interpreter sometimes abort it after all work is done.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        sys.exit(code)


def _run_command() -> int:
    """Run the command line and return its exit code. Translates exceptions of click and of disks."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="trainyard", standalone_mode=False)
    except USAGE_ERROR as error:
        if not str(error):  # a group without a subcommand; its help has been printed
            return 2
        if hint := _key_of_option(error):
            raise UserError(hint) from None
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        raise UserError(f"{' '.join(message.split())} (see trainyard --help)") from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRA_BY_MODULE:
            raise
        fix = f"pip install 'trainyard[{EXTRA_BY_MODULE[module]}]'"
        raise UserError(f"this needs the package {module}, which is not installed: {fix}") from None
    except OSError as error:
        if error.filename and error.errno in USER_ERRNOS:
            raise UserError(f"{error.filename}: {error.strerror}") from None
        if not is_not_writable(error):
            raise
        raise NotWritable(f"{error.filename or 'a file'}: {error.strerror}") from None
    return code if isinstance(code, int) else 0


def _key_of_option(error: Exception) -> str:
    """The error line for an unknown option that stands for a key of the configuration; empty for any other error."""
    option, command = getattr(error, "option_name", ""), getattr(getattr(error, "ctx", None), "command", None)
    takes_keys = any(parameter.name == "overrides" for parameter in getattr(command, "params", ()))
    if not takes_keys or not option.startswith("--"):
        return ""
    from trainyard.config.errors import KEYS_COMMAND, suggest_key  # imports all of the schema

    index = next((i for i, word in enumerate(sys.argv) if word.partition("=")[0] == option), len(sys.argv))
    _, equals, value = sys.argv[index].partition("=") if index < len(sys.argv) else ("", "", "")
    following = sys.argv[index + 1 : index + 2]
    if not equals and following and not following[0].startswith("--"):
        value = following[0]
    hint = suggest_key(option[2:], value=value or "VALUE")
    hint = hint.replace("nearest: ", "keys have no dashes; nearest: ", 1)
    return f"{option}: no such option; {hint}" if hint != KEYS_COMMAND else ""


def _on_thread_error(error: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread, unless the disk is full: TensorBoard's thread raises that in the main thread
    too, which then ends the command with one line."""
    if not is_not_writable(error.exc_value):
        threading.__excepthook__(error)


def _exit_with_error(line: str, code: int) -> None:
    """A name in the line may have a newline, or what a terminal takes for a command."""
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
    print(f"trainyard: {line}", file=sys.stderr)
    sys.exit(code)

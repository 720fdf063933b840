"""`trainyard import`: other systems' configurations, as ours, with what became of every key."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainyard import __version__
from trainyard.config.importers.key_table import ImportedConfig, format_value
from trainyard.config.importers.megatron.convert import import_flags, import_script
from trainyard.config.importers.nxdt.convert import import_nxdt, is_nxdt
from trainyard.config.load import dump, validate_imported
from trainyard.config.yaml_io import read_yaml
from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import UserError

YAML_SUFFIXES = {".yaml", ".yml"}
PLAIN_WIDTH = 140
"""Of the table where there is no terminal."""


def import_config(
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="NxD Training's YAML, or a shell script that runs pretrain_gpt.py.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]... [-- FLAGS]",
            help="Our keys (with a dot) to change, variables of the script (without), flags of Megatron-LM's after --.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT", help="Write our YAML there, not to the screen.")
    ] = None,
) -> None:
    """Bring a configuration of NxD Training or of Megatron-LM over to ours.

    Every key or flag is shown with what it becomes: a key of ours, nothing (and why), or one line that refuses it.
    Scripts are read, never run.

    Examples:

      trainyard import hf_llama3_70B_config.yaml

      trainyard import hf_llama3_8B_config.yaml -o llama3-8b.yaml

      trainyard import pretrain_gpt3.sh DATA_PATH=/data/my-gpt2_text_document train.steps=1000

      trainyard import -- --num-layers 12 --hidden-size 768 --num-attention-heads 12 ...

    `trainyard train`, `config` and the others take NxD Training's files as they are.
    """
    given, flags = _split_at_flags([source, *(words or [])])
    file = given.pop(0) if given and not given[0].startswith("-") and "=" not in given[0] else None
    variables = dict(word.split("=", 1) for word in given if "." not in word.partition("=")[0] and "=" in word)
    ours = [word for word in given if word.partition("=")[0] not in variables]
    mapped = _convert_source(file, variables, flags)
    config = validate_imported(mapped, ours, file or "flags")
    _print_key_table(mapped)
    text = f"# From {file or 'flags of Megatron-LM'}, by trainyard {__version__} import.\n" + dump(config)
    if out is None:
        sys.stdout.write(text)
        return
    target = out.expanduser()
    if target.is_dir() or not target.parent.is_dir() or (file and target.resolve() == Path(file).resolve()):
        raise UserError(f"--output {out}: cannot be written; name another file, in a directory that is there")
    atomic_write_text(target, text)
    print(f"  written      {out}   (trainyard train takes it)", file=sys.stderr)


def _split_at_flags(words: list[str]) -> tuple[list[str], list[str]]:
    """What stands before the first flag of Megatron-LM's, and the flags."""
    first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    return words[:first], words[first:]


def _convert_source(file: str | None, variables: dict[str, str], flags: list[str]) -> ImportedConfig:
    if file is None:
        if variables or not flags:
            raise UserError("import: name a file, or flags of Megatron-LM's after -- (see trainyard import --help)")
        return import_flags(flags)
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"{file}: no such file; wanted: NxD Training's YAML, or a script that runs pretrain_gpt.py")
    if path.suffix not in YAML_SUFFIXES:
        return import_script(path, variables, flags)
    if variables or flags:
        raise UserError(f"{[*variables, *flags][0]}: goes with a script; for {file}: our keys, such as train.steps=100")
    data = read_yaml(path)
    if not is_nxdt(data):
        raise UserError(f"{file}: not NxD Training's: no model_source; if it is ours, trainyard train takes it")
    return import_nxdt(data, file, path.parent)


def _print_key_table(mapped: ImportedConfig) -> None:
    """The table, then the warnings, on standard error."""
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else PLAIN_WIDTH)
    table = Table(box=None, pad_edge=False)
    table.add_column("theirs", overflow="fold")
    table.add_column("here", overflow="fold")
    for theirs, value, ours in mapped.outcomes:
        style = "dim" if ours.startswith("no effect") else ""
        table.add_row(*_text_cells((f"{theirs} = {format_value(value)}", ours)), style=style)
    console.print(table)
    for line in mapped.warnings:
        console.print(f"warning: {line}", style="yellow", soft_wrap=True, markup=False)


def _text_cells(texts: Iterable[str]) -> list[Text]:
    return [Text(text) for text in texts]

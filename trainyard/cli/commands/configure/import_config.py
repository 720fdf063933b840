"""`trainyard import`: Convert an NxD Training or Megatron-LM configuration."""

import sys
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from trainyard import __version__
from trainyard.cli.run_config import validate_imported
from trainyard.config.load import dump
from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import UserError
from trainyard.core.yaml_io import format_value, read_yaml
from trainyard.importers.key_table import ImportedConfig
from trainyard.importers.megatron.convert import import_flags, import_script
from trainyard.importers.nxdt import is_nxdt
from trainyard.importers.nxdt.convert import import_nxdt

YAML_SUFFIXES = {".yaml", ".yml"}
PLAIN_WIDTH = 140
"""Columns of the key table without a terminal."""


def import_config(
    source: Annotated[
        str, Argument(metavar="FILE", help="YAML of NxD Training, or a shell script that runs pretrain_gpt.py.")
    ],
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="KEY=VALUE|-- FLAGS",
            help="trainyard keys (with a dot), script variables (without), Megatron-LM flags (after --).",
        ),
    ] = None,
    drop_flags: Annotated[
        list[str] | None,
        Option("--drop-flag", metavar="FLAG", help="Megatron-LM flag to leave out, such as lora-rank; repeatable."),
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="OUT", help="Write the YAML to a file instead of stdout.")
    ] = None,
) -> None:
    """Convert a configuration of NxD Training or Megatron-LM to trainyard YAML.

    Shows the result of every key or flag: the trainyard key, "no effect" with the reason, or one line that rejects it.
    Scripts are parsed, never run. `trainyard train` and the other commands also accept NxD Training files directly.

    Examples:

      trainyard import hf_llama3_70B_config.yaml

      trainyard import hf_llama3_8B_config.yaml -o llama3-8b.yaml

      trainyard import pretrain_gpt3.sh DATA_PATH=/data/my-gpt2 train.steps=1000

      trainyard import train.sh --drop-flag fp8-format -- --lr 1e-4

      trainyard import -- --num-layers 12 --hidden-size 768 ...
    """
    words = [source, *(arguments or [])]
    split = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    positional, flags = words[:split], words[split:]
    has_file = positional and not positional[0].startswith("-") and "=" not in positional[0]
    file = positional.pop(0) if has_file else None
    pairs = [(argument, *argument.partition("=")[::2]) for argument in positional]
    variables = {key: value for argument, key, value in pairs if "." not in key and "=" in argument}
    overrides = [argument for argument, key, _ in pairs if key not in variables]
    imported = _convert_source(file, variables, flags, drop_flags or [])
    config = validate_imported(imported, overrides, file or "flags")
    _print_key_table(imported)
    text = f"# Imported from {file or 'Megatron-LM flags'} by trainyard {__version__}.\n" + dump(config)
    if output is None:
        sys.stdout.write(text)
        return
    target = output.expanduser()
    if target.is_dir() or not target.parent.is_dir() or (file and target.resolve() == Path(file).resolve()):
        raise UserError(f"--output {output}: cannot be written; name another file in an existing directory")
    atomic_write_text(target, text)
    print(f"  written      {output}   (run: trainyard train {output})", file=sys.stderr)


def _convert_source(
    file: str | None, variables: dict[str, str], flags: list[str], dropped: list[str]
) -> ImportedConfig:
    if file is None:
        if variables or not flags:
            raise UserError("import: name a file, or Megatron-LM flags after -- (see trainyard import --help)")
        return import_flags(flags, dropped)
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"{file}: no such file; expected NxD Training YAML or a script that runs pretrain_gpt.py")
    if path.suffix not in YAML_SUFFIXES:
        return import_script(path, variables, flags, dropped)
    if variables or flags or dropped:
        name = [*variables, *flags, *(f"--drop-flag {flag}" for flag in dropped)][0]
        raise UserError(f"{name}: only valid for a script; {file} takes trainyard keys, such as train.steps=100")
    data = read_yaml(path)
    if not is_nxdt(data):
        raise UserError(f"{file}: not an NxD Training file: no model_source; run trainyard files with trainyard train")
    return import_nxdt(data, file, path.parent)


def _print_key_table(imported: ImportedConfig) -> None:
    """Print the result of each key, then the warnings, to stderr."""
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else PLAIN_WIDTH)
    table = Table(box=None, pad_edge=False)
    table.add_column("theirs", overflow="fold")
    table.add_column("trainyard", overflow="fold")
    for key, value, outcome in imported.outcomes:
        style = "dim" if outcome.startswith("no effect") else ""
        table.add_row(Text(f"{key} = {format_value(value)}"), Text(outcome), style=style)
    console.print(table)
    for line in imported.warnings:
        console.print(f"warning: {line}", style="yellow", soft_wrap=True, markup=False)

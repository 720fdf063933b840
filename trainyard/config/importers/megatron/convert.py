"""Megatron-LM's flags, from a launch script or a list, as a configuration of ours.

The script is read as text (shell.py); nothing in it runs. Defaults are Megatron-LM's, not ours: a flag that is left out
means there what it means there.
"""

import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from trainyard.config.importers.key_table import (
    ImportedConfig,
    check_value,
    format_value,
    ignored_warnings,
    key_outcome,
    nearest_name,
    run_name,
    set_key,
)
from trainyard.config.importers.megatron import sections as parts
from trainyard.config.importers.megatron.keys import MEGATRON_FLAGS
from trainyard.config.importers.shell.script import UNKNOWN_MARK, ShellCommand, read_commands
from trainyard.core.errors import UserError, one_line

TRAINING_PROGRAM = re.compile(r"(?:.*/)?(pretrain_\w+|train_\w+)\.py")
GPT_PROGRAM = re.compile(r"pretrain_gpt(_mp|_core)?")
UNREAD_FLAGS = ": flags in it are not seen"
OPTIONAL_PATHS = {"save", "save-xser", "load", "load-xser", "tensorboard-dir"}
"""Paths with a default of ours: where the script does not say them, they are left out."""


class TrainingCommand(NamedTuple):
    flags: list[str]
    launcher: list[str]
    """What stands before the program: torchrun and its own options."""
    variables: Mapping[str, list[str]]


def import_script(path: Path, variables: Mapping[str, str], flags: list[str]) -> ImportedConfig:
    """What a launch script becomes here; `given` are variables for it, `flags` further ones that win over its own."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    try:
        script = _find_training_command(text, variables, path)
        return _import_command(script._replace(flags=[*script.flags, *flags]), path.stem)
    except UserError as error:
        said = one_line(error)
        raise UserError(said if said.startswith(f"{path}") else f"{path}: {said}") from None


def import_flags(flags: list[str]) -> ImportedConfig:
    return _import_command(TrainingCommand([word.replace(UNKNOWN_MARK, "") for word in flags], [], {}), "megatron")


def _find_training_command(text: str, given: Mapping[str, str], path: Path) -> TrainingCommand:
    """The command that runs Megatron-LM's GPT: the first one, where there are several."""
    found: list[tuple[ShellCommand, int, str]] = []
    for command in read_commands(text, given, str(path)):
        places = ((n, TRAINING_PROGRAM.fullmatch(word)) for n, word in enumerate(command.words))
        program = next(((n, match[1]) for n, match in places if match), None)
        if program:
            found.append((command, *program))
    if not found:
        raise UserError("no command runs pretrain_gpt.py; wanted: a launch script of Megatron-LM's, or flags after --")
    command, place, name = next((each for each in found if GPT_PROGRAM.fullmatch(each[2])), found[0])
    if not GPT_PROGRAM.fullmatch(name):
        raise UserError(
            f"line {command.line}: {name}.py: only Megatron-LM's GPT is read (its BERT and T5 are other models than "
            "ours); nearest: pretrain_gpt.py, or the recipe bert-large-phase1"
        )
    return TrainingCommand(command.words[place + 1 :], command.words[:place], command.variables)


def _import_command(script: TrainingCommand, name: str) -> ImportedConfig:
    warn: list[str] = []
    try:
        return _convert(script, name, warn)
    except UserError as error:
        unseen = [f" ({line})" for line in warn if line.endswith(UNREAD_FLAGS)]
        raise UserError(f"{error}{''.join(unseen[:1])}") from None


def _convert(script: TrainingCommand, name: str, warn: list[str]) -> ImportedConfig:
    said = _parse_flags(script.flags, warn)
    for flag, value in said.items():
        check_value(f"--{flag}", value, MEGATRON_FLAGS[flag])
        warn += ignored_warnings(f"--{flag}", value, MEGATRON_FLAGS[flag])
    out: dict[str, Any] = {"model": parts.model_section(said, warn)}
    ranks = _rank_count(script.launcher, warn)
    bf16 = script.variables.get("XLA_USE_BF16") == ["1"]
    for part in (parts.train_keys(said, ranks), parts.schedule_keys(said), parts.precision_keys(said, bf16, warn)):
        for ours, value in part.items():
            set_key(out, ours, value)
    for part in (
        parts.layout_keys(said, ranks),
        parts.recompute_keys(said),
        parts.data_keys(said),
        parts.checkpoint_and_log_keys(said, warn),
    ):
        for ours, value in part.items():
            set_key(out, ours, value)
    set_key(out, "log.name", run_name(PurePath(name).name))
    rows = [key_outcome(f"--{flag}", value, MEGATRON_FLAGS[flag], out) for flag, value in said.items()]
    return ImportedConfig(
        out, rows, warn, "the vocabulary is the tokenizer's; put its file there, or say model.vocab=50257"
    )


def _parse_flags(words: list[str], warn: list[str]) -> dict[str, Any]:
    """Flags and their values, of the kinds that the table wants. Of a flag given twice the last one counts."""
    said: dict[str, Any] = {}
    words = [word for word in words if word]
    while words:
        flag, equals, value = words.pop(0).partition("=")
        name = flag.removeprefix("--")
        if UNKNOWN_MARK in flag:
            warn.append(f"{_unknown_name(flag)} is not known from the script alone{UNREAD_FLAGS}")
            continue
        if not flag.startswith("--"):
            raise UserError(f"{format_value(flag)}: a word where a flag was expected")
        if name not in MEGATRON_FLAGS:
            raise UserError(f"--{format_value(name)}: unknown flag; nearest: --{nearest_name(name, MEGATRON_FLAGS)}")
        takes = MEGATRON_FLAGS[name].value_type
        taken = [value] if equals else []
        while words and not words[0].startswith("--") and not equals and takes != "switch":
            if takes != "words" and taken:
                break
            taken.append(words.pop(0))
        unknown = next((word for word in taken if UNKNOWN_MARK in word), None)
        if unknown is not None and MEGATRON_FLAGS[name].action == "maps":
            what = f"--{name}: {_unknown_name(unknown)} is not known from the script alone"
            if name not in OPTIONAL_PATHS:
                raise UserError(f"{what}; assign it there, or give it: NAME=VALUE after the file")
            warn.append(f"{what}; left out")
            continue
        said[name] = _parse_value(name, takes, taken)
    return said


def _parse_value(name: str, takes: str, taken: list[str]) -> object:
    if takes == "words":
        return taken
    if takes == "switch":
        if taken:
            raise UserError(f"--{name}={format_value(taken[0])}: takes no value")
        return True
    if not taken:
        raise UserError(f"--{name}: a value is missing")
    text = taken[0].replace(UNKNOWN_MARK, "")
    try:
        return {"int": int, "number": float}.get(takes, str)(text)
    except ValueError:
        return text  # check() says what is wrong with it


def _rank_count(launcher: list[str], warn: list[str]) -> int | None:
    """Processes per node times nodes, as torchrun was told."""
    words = [part for word in launcher for part in word.split("=", 1)]
    counts = {}
    for name in ("nproc-per-node", "nnodes"):
        place = next((n for n, word in enumerate(words) if word.lstrip("-").replace("_", "-") == name), None)
        text = words[place + 1] if place is not None and place + 1 < len(words) else "1" if name == "nnodes" else ""
        if not re.fullmatch(r"\d{1,7}", text) or int(text) == 0:
            if launcher:
                warn.append(
                    f"--{name} {_unknown_name(text) or 'is not given'}: how many ranks it was written for is not known"
                )
            return None
        counts[name] = int(text)
    return counts["nproc-per-node"] * counts["nnodes"]


def _unknown_name(text: str) -> str:
    """What is unknown in a word, as a person wrote it."""
    parts = text.split(UNKNOWN_MARK)
    return (f"${parts[1]}" if parts[1][:1] != "$" and parts[1][:1] != "`" else parts[1]) if len(parts) > 1 else text

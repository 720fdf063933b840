"""Import of Megatron-LM's flags, from a launch script or a list.

A script is parsed as text (importers/shell); nothing in it runs. A flag that is absent has Megatron-LM's default, not
ours.
"""

import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath
from typing import Any

from trainyard.core.errors import UserError, one_line
from trainyard.core.quantities import counted
from trainyard.core.yaml_io import format_value
from trainyard.importers.key_table import (
    ImportedConfig,
    KeyOutcome,
    check_values,
    copied_keys,
    hardware_of_ranks,
    key_outcome,
    nearest_name,
    run_name,
    set_keys,
)
from trainyard.importers.known_models import find_known_model
from trainyard.importers.megatron import sections
from trainyard.importers.megatron.keys import MEGATRON_FLAGS
from trainyard.importers.shell.script import (
    TEST_COMMANDS,
    UNKNOWN_MARK,
    ShellCommand,
    Variables,
    name_in_script,
    read_commands,
)

TRAINING_PROGRAM = re.compile(r"(?:.*/)?(pretrain_\w+|train_\w+)\.py")
GPT_PROGRAM = re.compile(r"pretrain_gpt(_mp|_core)?")
NOT_LAUNCHERS = {*TEST_COMMANDS, "echo", "printf", "ls", "cat", "cp", "ln", "chmod", "exit"}
"""Commands that may name the training program without running it."""
UNREAD_FLAGS = "; flags inside it are not imported"
OPTIONAL_PATHS = {"save", "save-xser", "load", "load-xser", "tensorboard-dir"}
"""Flags that are dropped with a warning if their value is unknown, because our keys have defaults."""
INPUT_PATHS = {"data-path", "vocab-file", "merge-file", "tokenizer-model"}
"""Flags whose unknown value is kept as the script has it, with a warning: the user names the files before the run."""
SHELLS = ("sh", "bash")
SBATCH_LINE = re.compile(r"^#SBATCH\s+(.*)", re.MULTILINE)
VOCAB_HINT = "the vocabulary size comes from the tokenizer: provide its file, or set model.vocab=50257"


def import_script(
    path: Path, variables: Mapping[str, str], flags: list[str], dropped: Collection[str] = ()
) -> ImportedConfig:
    """Import a launch script. `variables` are preset for the script, `flags` override those of the script, and
    `dropped` names flags of the script to leave out."""
    try:
        text = path.read_text(encoding="utf-8").replace(UNKNOWN_MARK, "")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    try:
        command, index = _find_training_command(text, variables, path)
        job = [word for options in SBATCH_LINE.findall(text) for word in options.split()]
        launcher, words = [*command.words[:index], *job], command.words[index + 1 :]
        imported = _import_command([*words, *flags], path.stem, launcher, command.variables, dropped)
    except UserError as error:
        message = one_line(error)
        raise UserError(message if message.startswith(f"{path}") else f"{path}: {message}") from None
    imported.warnings.extend(
        f"{place}: assigns flags only under a condition that the script alone does not decide; they are not imported, "
        "pass those you need after --"
        for place in command.skipped_flags
    )
    return imported


def import_flags(flags: list[str], dropped: Collection[str] = ()) -> ImportedConfig:
    """Import a list of flags."""
    return _import_command([word.replace(UNKNOWN_MARK, "") for word in flags], "megatron", [], {}, dropped)


def _find_training_command(text: str, variables: Mapping[str, str], path: Path) -> tuple[ShellCommand, int]:
    """Return the first command that runs Megatron-LM's GPT, and the position of the program in it."""
    candidates = [
        (command, index, match[1])
        for outer in read_commands(text, variables, str(path))
        if outer.words and outer.words[0] not in NOT_LAUNCHERS
        for command in _shell_commands(outer, str(path))
        for index, word in enumerate(command.words)
        if (match := TRAINING_PROGRAM.fullmatch(word))
    ]
    if not candidates:
        raise UserError("no command runs pretrain_gpt.py; expected a launch script of Megatron-LM, or flags after --")
    command, index, name = next((entry for entry in candidates if GPT_PROGRAM.fullmatch(entry[2])), candidates[0])
    if not GPT_PROGRAM.fullmatch(name):
        raise UserError(
            f"line {command.line}: {name}.py: only Megatron-LM's GPT can be imported (its BERT and T5 differ from our "
            "models); nearest: pretrain_gpt.py, or the recipe bert-large-phase1"
        )
    return command, index


def _shell_commands(command: ShellCommand, source: str) -> list[ShellCommand]:
    """The command, or those that it gives to a shell, such as `srun sh -c "$run_cmd"`, with srun as their launcher."""
    words = command.words
    starts = (i for i, word in enumerate(words[:-2]) if PurePath(word).name in SHELLS and words[i + 1] in ("-c", "-lc"))
    if words[0] == "eval":
        launcher, text = [], " ".join(words[1:])
    elif (index := next(starts, None)) is not None:
        launcher, text = words[:index], words[index + 2]
    else:
        return [command]
    variables = {name: " ".join(value) for name, value in command.variables.items()}
    try:
        return [command._replace(words=[*launcher, *part.words]) for part in read_commands(text, variables, source)]
    except UserError:  # such as a quote that only execution would close
        return [command]


def _import_command(
    words: list[str], name: str, launcher: list[str], variables: Variables, dropped: Collection[str]
) -> ImportedConfig:
    """Import the flags `words`. `launcher` holds the words before the program: torchrun and its options."""
    warnings: list[str] = []
    refused: dict[str, str] = {}
    try:
        words = _drop_flags(words, [flag.removeprefix("--") for flag in dropped])
        flags = _parse_flags(words, warnings, refused)
        check_values(flags, MEGATRON_FLAGS, warnings, "--", refused)
        data: dict[str, Any] = {"model": sections.model_section(flags, warnings)}
        set_keys(data, copied_keys(flags, MEGATRON_FLAGS))
        if "vocab" not in data["model"] and (known := find_known_model(data["model"])):
            data["model"]["vocab"] = known.vocab
            warnings.append(f"model.vocab: {known.vocab}, that of {known.name}, which has these sizes")
        per_node, nodes = _launcher_sizes(launcher, warnings)
        ranks = per_node * nodes or None
        if hardware := hardware_of_ranks(per_node, nodes, gpus=True):
            data["hardware"] = hardware
            warnings.append(
                f"hardware: {hardware}, assumed from {counted(per_node, 'rank')} per node; change it where it is not"
            )
        for keys in (
            sections.train_keys(flags, ranks),
            sections.schedule_keys(flags),
            sections.precision_keys(flags, variables.get("XLA_USE_BF16") == ["1"], warnings),
            sections.layout_keys(flags, ranks),
            sections.recompute_keys(flags),
            sections.data_keys(flags),
            sections.checkpoint_and_log_keys(flags, warnings),
            {"log.name": run_name(PurePath(name).name)},
        ):
            set_keys(data, keys)
    except UserError as error:
        unread = next((f" ({line})" for line in warnings if line.endswith(UNREAD_FLAGS)), "")
        also = _refusal(refused, dropped)
        raise UserError(f"{error}{unread}" + (f"; and {also}" if also else "")) from None
    if refused:
        raise UserError(_refusal(refused, dropped))
    outcomes = [key_outcome(f"--{flag}", value, MEGATRON_FLAGS[flag], data) for flag, value in flags.items()]
    outcomes += [KeyOutcome(f"--{flag.removeprefix('--')}", None, "dropped by --drop-flag") for flag in dropped]
    return ImportedConfig(data, outcomes, warnings, VOCAB_HINT)


def _refusal(refused: Mapping[str, str], dropped: Collection[str]) -> str:
    """All refused flags, and the options that leave them out; empty if there are none."""
    if not refused:
        return ""
    flags = [flag.removeprefix("--") for flag in dropped] + list(refused)
    options = " ".join(f"--drop-flag {shlex.quote(flag[:60])}" for flag in flags)
    return f"{'; '.join(refused.values())} (to leave {'it' if len(flags) == 1 else 'them'} out: {options})"


def _drop_flags(words: list[str], dropped: Collection[str]) -> list[str]:
    """Return the words without the flags in `dropped` and their values."""
    names = [word.removeprefix("--").partition("=")[0] if word.startswith("--") else None for word in words]
    for flag in dropped:
        if flag not in names:
            known = [name for name in names if name] or [""]
            raise UserError(f"--drop-flag {flag}: the command has no such flag; nearest: {nearest_name(flag, known)}")
    kept: list[str] = []
    drops = False
    for word, name in zip(words, names, strict=True):
        drops = name in dropped if name else drops
        kept += [] if drops else [word]
    return kept


def _parse_flags(words: list[str], warnings: list[str], refused: dict[str, str]) -> dict[str, Any]:
    """Return values by flag without dashes, in the types of the table. The last of several equal flags wins. Unknown
    flags are added to `refused`."""
    flags: dict[str, Any] = {}
    words = [word for word in words if word]
    while words:
        flag, equals, text = words.pop(0).partition("=")
        name = flag.removeprefix("--")
        if UNKNOWN_MARK in flag:
            warnings.append(f"{_unknown_name(flag)} is not known from the script alone{UNREAD_FLAGS}")
            continue
        if not flag.startswith("--"):
            raise UserError(f"{format_value(flag)}: expected a flag")
        if name not in MEGATRON_FLAGS:
            refused[name] = f"--{format_value(name)}: unknown flag; nearest: --{nearest_name(name, MEGATRON_FLAGS)}"
            while words and not words[0].startswith("--"):
                words.pop(0)
            continue
        rule = MEGATRON_FLAGS[name]
        values = [text] if equals else []
        max_values = 1 if equals else {"switch": 0, "words": len(words)}.get(rule.value_type, 1)
        while words and not words[0].startswith("--") and len(values) < max_values:
            values.append(words.pop(0))
        unknown = next((value for value in values if UNKNOWN_MARK in value), None)
        if unknown is not None and rule.action in ("copied", "maps"):
            message = f"--{name}: {_unknown_name(unknown)} is not known from the script alone"
            if name in OPTIONAL_PATHS:
                warnings.append(f"{message}; left out")
                continue
            if name not in INPUT_PATHS:
                raise UserError(f"{message}; assign it in the script, or pass NAME=VALUE after the file")
            warnings.append(f"{message}; set {rule.target.partition(',')[0]}, or pass NAME=VALUE after the file")
            values = [_known_text(value) for value in values]
        flags[name] = _parse_value(name, rule.value_type, values)
    return flags


def _parse_value(name: str, value_type: str, values: list[str]) -> object:
    if value_type == "words":
        return values
    if value_type == "switch":
        if values:
            raise UserError(f"--{name}={format_value(values[0])}: takes no value")
        return True
    if not values:
        raise UserError(f"--{name}: needs a value")
    text = values[0].replace(UNKNOWN_MARK, "")
    try:
        return {"int": int, "number": float}.get(value_type, str)(text)
    except ValueError:
        return text  # check_value reports the wrong type


def _launcher_sizes(launcher: list[str], warnings: list[str]) -> tuple[int, int]:
    """Return processes per node and nodes, from the options of torchrun, or of srun and sbatch; zeros if they are
    unknown."""
    words = [part for word in launcher for part in word.split("=", 1)]
    names = [word.lstrip("-").replace("_", "-") for word in words]
    sizes: list[int] = []
    for name, of_slurm, default in (("nproc-per-node", ("ntasks-per-node",), ""), ("nnodes", ("nodes", "N"), "1")):
        index = next((names.index(known) + 1 for known in (name, *of_slurm) if known in names), len(words))
        text = words[index] if index < len(words) else default
        if not re.fullmatch(r"\d{1,7}", text) or int(text) == 0:
            if launcher:
                warnings.append(f"--{name} {_unknown_name(text) or 'is missing'}: the number of ranks is unknown")
            return 0, 0
        sizes.append(int(text))
    return sizes[0], sizes[1]


def _unknown_name(text: str) -> str:
    """Return the unknown part of a word as it is written in the script."""
    if UNKNOWN_MARK not in text:
        return text
    name = name_in_script(text.split(UNKNOWN_MARK)[1])
    return name if name.startswith(("$", "`", "<")) else f"${name}"


def _known_text(text: str) -> str:
    """Return a word with its unknown parts as they are written in the script."""
    parts = text.split(UNKNOWN_MARK)
    marked = [_unknown_name(f"{UNKNOWN_MARK}{part}") for part in parts[1::2]]
    return "".join(part for pair in zip(parts[::2], [*marked, ""], strict=True) for part in pair)

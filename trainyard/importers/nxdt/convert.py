"""Import of an NxD Training (NxDT) YAML file.

Every key is looked up in one table (keys.py): it maps to our keys, has no effect, or is refused. Where
NxDT itself does something else than a mapped key says, a warning explains it; our run does what the key says.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainyard.core.errors import UserError, one_line
from trainyard.core.yaml_io import format_value
from trainyard.importers.key_table import (
    ImportedConfig,
    check_choice,
    check_values,
    copied_keys,
    hardware_of_ranks,
    ignore,
    key_outcome,
    nearest_name,
    set_keys,
    split_names,
)
from trainyard.importers.nxdt import alignment, sections
from trainyard.importers.nxdt.interpolation import resolve
from trainyard.importers.nxdt.keys import KEYS_FOUND_AT_ANY_DEPTH, MANUAL_PRECISION, NXDT_KEYS
from trainyard.importers.nxdt.model import hf_model_section, megatron_model_section
from trainyard.importers.nxdt.sections import data_keys

EMPTY_MEANS = {"model_alignment_strategy.sft": "packing=false", "model_alignment_strategy.peft": "lora_rank=16"}
"""Sections that change the run even if they are empty, and what they mean then."""
UNREAD_MANUAL_KEYS = dict.fromkeys(
    split_names(MANUAL_PRECISION, "precision."), ignore("any", "read only with precision.type=manual")
)


def import_nxdt(tree: dict[str, Any], source: str, directory: Path) -> ImportedConfig:
    """Import a parsed file. Relative paths in it are also tried relative to `directory`, the location of the file."""
    try:
        return _convert(resolve(tree), directory)
    except UserError as error:
        raise UserError(f"{source}: {one_line(error)}") from None


def _convert(tree: dict[str, Any], directory: Path) -> ImportedConfig:
    warnings: list[str] = []
    all_keys = _collect_keys(tree, warnings)
    check_values(all_keys, NXDT_KEYS, warnings)
    keys = {name: value for name, value in all_keys.items() if value is not None}  # null stands for the default
    check_choice("model_source", keys.get("model_source"), ("hf", "megatron"), "hf")
    if keys["model_source"] == "hf":
        model, missing_hint = hf_model_section(keys, directory, warnings)
    else:
        model, missing_hint = megatron_model_section(keys, warnings)
    data: dict[str, Any] = {"model": model}
    devices, nodes = keys.get("trainer.devices"), keys.get("trainer.num_nodes")
    if devices and nodes and (hardware := hardware_of_ranks(devices, nodes, gpus=False)):
        data["hardware"] = hardware
    set_keys(data, copied_keys(keys, NXDT_KEYS))
    for section_keys in (
        sections.layout_keys,
        sections.precision_keys,
        sections.optimizer_keys,
        sections.schedule_keys,
        sections.recompute_keys,
        sections.checkpoint_keys,
        data_keys,
        alignment.lora_keys,
        alignment.preference_keys,
        sections.log_keys,
    ):
        set_keys(data, section_keys(keys, warnings))
    _warn_about_defects(keys, model, warnings)
    rules = NXDT_KEYS if keys.get("precision.type") == "manual" else NXDT_KEYS | UNREAD_MANUAL_KEYS
    outcomes = [key_outcome(name, value, rules[name], data) for name, value in all_keys.items()]
    return ImportedConfig(data, outcomes, warnings, missing_hint)


def _collect_keys(tree: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Return values by dotted key. NxDT searches the entire tree for some names if their regular place is empty."""
    leaves = list(_leaves(tree, ""))
    keys = {name: value for name, value in leaves if name in NXDT_KEYS}
    for name, value in leaves:
        if name in NXDT_KEYS:
            continue
        regular = KEYS_FOUND_AT_ANY_DEPTH.get(name.rsplit(".", 1)[-1])
        if regular is None:
            raise UserError(f"{name}={format_value(value)}: unknown key; nearest: {nearest_name(name, NXDT_KEYS)}")
        is_used = not keys.get(regular)
        keys[regular] = value if is_used else keys[regular]
        warnings.append(
            f"{format_value(name)}={format_value(value)}: NxDT finds this name at any depth; its regular place is "
            + (f"{regular}, which it sets" if is_used else f"{regular}={format_value(keys[regular])}, which wins")
        )
    return keys


def _leaves(node: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        dotted = prefix + name
        rules_below = [rule for key, rule in NXDT_KEYS.items() if key.startswith(f"{dotted}.")]
        if dotted in NXDT_KEYS:
            yield dotted, value
        elif isinstance(value, dict) and (value or not rules_below):
            yield from _leaves(value, f"{dotted}.")
        elif rules_below and value is not None and all(rule.action == "refused" for rule in rules_below):
            raise UserError(f"{dotted}: {rules_below[0].target}")
        elif value not in (None, {}) and rules_below:
            nearest = nearest_name(dotted, NXDT_KEYS)
            raise UserError(f"{dotted}={format_value(value)}: not a mapping; expected keys such as {nearest}")
        elif value == {} and dotted in EMPTY_MEANS:  # NxDT acts on the section itself
            raise UserError(f"{dotted}: empty; nearest: {dotted}.{EMPTY_MEANS[dotted]}")
        elif not rules_below:
            yield dotted, value


def _warn_about_defects(keys: dict[str, Any], model: dict[str, Any], warnings: list[str]) -> None:
    """Warn where NxDT does not do what a mapped key says (found by reading its source)."""
    is_hf = keys["model_source"] == "hf"
    norm_decay = bool(keys.get("model.do_layer_norm_weight_decay"))
    if is_hf and not norm_decay:
        warnings.append(
            "model.do_layer_norm_weight_decay: NxDT inverts this key for Hugging Face models and decays norms if it is "
            "false; here norms and biases never decay, as in NxDT with true"
        )
    if not is_hf and norm_decay:
        warnings.append("model.do_layer_norm_weight_decay=true: norms and biases never decay here")
    if is_hf:
        warnings.append(
            "data.train_dir: NxDT reads samples in file order, and starts over at the first one after a resume; "
            "here they are shuffled by train.seed, and a resumed run continues with the next sample"
        )
    replicator, kv_heads = keys.get("distributed_strategy.kv_replicator"), model.get("kv_heads")
    tp = keys.get("distributed_strategy.tensor_model_parallel_size") or 1
    if replicator and kv_heads and keys.get("model.qkv_linear") and replicator != max(tp // kv_heads, 1):
        warnings.append(
            f"distributed_strategy.kv_replicator={replicator}: here each of {kv_heads} kv heads is held by "
            f"{max(tp // kv_heads, 1)} of {tp} tensor parallel ranks"
        )
    precision = str(keys.get("precision.type"))
    if re.fullmatch(r"mixed_precision_?SR", precision):
        warnings.append(
            f"precision.type={precision}: NxDT spells this value in two ways, each rejected by some of its code; both "
            "are imported as bf16 with fp32 master weights (whose update needs no stochastic rounding)"
        )

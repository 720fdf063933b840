"""An NxD Training (NxDT) YAML file as a configuration of ours, so that its users need not rewrite it.

Every key is looked up in one table (nxdt_keys.py, nxdt_model_keys.py): it maps, has no effect, or is refused by name.
Where NxDT does something else than its key says, and a mapped key touches it, a warning says so: the run here does what
the key says.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainyard.config.importers.key_table import (
    ImportedConfig,
    KeyRule,
    check_value,
    format_value,
    ignore,
    ignored_warnings,
    key_outcome,
    nearest_name,
    set_key,
)
from trainyard.config.importers.nxdt import sections as parts
from trainyard.config.importers.nxdt.data import data_keys
from trainyard.config.importers.nxdt.interpolation import resolve
from trainyard.config.importers.nxdt.keys import MANUAL_ONLY, MANUAL_PRECISION_KEYS
from trainyard.config.importers.nxdt.model import hf_model_section, megatron_model_section
from trainyard.config.importers.nxdt.model_keys import KEYS_FOUND_AT_ANY_DEPTH, NXDT_KEYS
from trainyard.core.errors import UserError, one_line

NXDT_SECTIONS = {"trainer", "exp_manager", "distributed_strategy"}
"""Top level of every NxDT file, and of none of ours."""
DIRECT_KEYS = {
    "seed": "train.seed",
    "bucket_size_collectives": "layout.bucket_mib",
    "trainer.max_steps": "train.steps",
    "trainer.log_every_n_steps": "log.every",
    "data.micro_batch_size": "train.micro_batch",
    "data.global_batch_size": "train.global_batch",
    "distributed_strategy.tensor_model_parallel_size": "layout.tp",
    "distributed_strategy.pipeline_model_parallel_size": "layout.pp",
    "distributed_strategy.virtual_pipeline_model_parallel_size": "layout.vpp",
    "distributed_strategy.context_parallel_size": "layout.cp",
    "exp_manager.create_tensorboard_logger": "log.tensorboard",
    "exp_manager.checkpoint_callback_params.dirpath": "checkpoint.directory",
}
"""Keys whose value is ours as it stands."""
UNREAD_MANUAL_KEY = ignore("any", MANUAL_ONLY)


def is_nxdt(tree: dict[str, Any]) -> bool:
    model = tree.get("model")
    own = isinstance(model, dict) and bool({"family", "from_hf"} & set(model))
    return not own and ("model_source" in tree or len(NXDT_SECTIONS & set(tree)) > 1)


def import_nxdt(tree: dict[str, Any], source: str, directory: Path) -> ImportedConfig:
    """What a file becomes here; `directory` is where it lies."""
    try:
        return _convert(resolve(tree), directory)
    except UserError as error:
        raise UserError(f"{source}: {one_line(error)}") from None


def _convert(tree: dict[str, Any], directory: Path) -> ImportedConfig:
    warn: list[str] = []
    said = _collect_keys(tree, warn)
    for name, value in said.items():
        check_value(name, value, NXDT_KEYS[name])
        warn += ignored_warnings(name, value, NXDT_KEYS[name])
    source = said.get("model_source")
    if source not in ("hf", "megatron"):
        raise UserError(f"model_source={format_value(source)}: not one of hf, megatron; nearest: hf")
    out: dict[str, Any] = {}
    for theirs, ours in DIRECT_KEYS.items():
        if said.get(theirs) is not None:
            set_key(out, ours, said[theirs])
    model, hint = hf_model_section(said, directory, warn) if source == "hf" else megatron_model_section(said, warn)
    out["model"] = model
    for part in (
        parts.layout_keys,
        parts.precision_keys,
        parts.optimizer_keys,
        parts.schedule_keys,
        parts.recompute_keys,
        parts.checkpoint_keys,
    ):
        for ours, value in part(said, warn).items():
            set_key(out, ours, value)
    for ours, value in (data_keys(said, warn) | parts.log_keys(said)).items():
        set_key(out, ours, value)
    _warn_about_defects(said, model, warn)
    unread = (
        set() if said.get("precision.type") == "manual" else {f"precision.{name}" for name in MANUAL_PRECISION_KEYS}
    )
    rows = [
        key_outcome(name, value, UNREAD_MANUAL_KEY if name in unread else NXDT_KEYS[name], out)
        for name, value in said.items()
    ]
    return ImportedConfig(out, rows, warn, hint)


def _collect_keys(tree: dict[str, Any], warn: list[str]) -> dict[str, Any]:
    """Dotted keys that the table knows. NxDT finds some names wherever they stand, if their place says nothing."""
    said: dict[str, Any] = {}
    found = list(_leaves(tree, "", NXDT_KEYS))
    for name, value in found:
        if name in NXDT_KEYS:
            said[name] = value
    for name, value in found:
        if name in NXDT_KEYS:
            continue
        place = KEYS_FOUND_AT_ANY_DEPTH.get(name.rsplit(".", 1)[-1])
        if place is None:
            raise UserError(f"{name}={format_value(value)}: unknown key; nearest: {nearest_name(name, NXDT_KEYS)}")
        taken = not said.get(place)
        said[place] = value if taken else said[place]
        warn.append(
            f"{format_value(name)}={format_value(value)}: NxDT finds this name anywhere; its place is {place}, "
            + ("for which it is taken" if taken else f"which says {format_value(said[place])} and wins")
        )
    return said


def _leaves(node: dict[str, Any], prefix: str, table: dict[str, KeyRule]) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        dotted = prefix + name
        below = [key for each, key in table.items() if each.startswith(f"{dotted}.")]
        if dotted in table:
            yield dotted, value
        elif isinstance(value, dict) and (value or not below):
            yield from _leaves(value, f"{dotted}.", table)
        elif below and value is not None and all(key.action == "refused" for key in below):
            raise UserError(f"{dotted}: {below[0].target}")
        elif value not in (None, {}) and below:
            raise UserError(
                f"{dotted}={format_value(value)}: not a mapping; wanted: keys such as {nearest_name(dotted, table)}"
            )
        elif not below:
            yield dotted, value


def _warn_about_defects(said: dict[str, Any], model: dict[str, Any], warn: list[str]) -> None:
    """Where NxDT does not do what a mapped key says (as read in its sources)."""
    hf = said["model_source"] == "hf"
    decay = bool(said.get("model.do_layer_norm_weight_decay"))
    if hf and not decay:
        warn.append(
            "model.do_layer_norm_weight_decay: NxDT inverts it for Hugging Face models, and decays norms where it is "
            "false; norms and biases never decay here, as there with true"
        )
    if not hf and decay:
        warn.append("model.do_layer_norm_weight_decay=true: norms and biases never decay here")
    if hf:
        warn.append(
            "data.train_dir: NxDT reads samples in the order of the file, and from its beginning again after a resume; "
            "here they are shuffled by train.seed, and a resumed run goes on where it was"
        )
    replicator, kv = said.get("distributed_strategy.kv_replicator"), model.get("kv_heads")
    tp = said.get("distributed_strategy.tensor_model_parallel_size") or 1
    if replicator and kv and said.get("model.qkv_linear") and replicator != max(tp // kv, 1):
        warn.append(
            f"distributed_strategy.kv_replicator={replicator}: each of {kv} kv heads is held by {max(tp // kv, 1)} of "
            f"{tp} tensor-parallel ranks here"
        )
    kind = str(said.get("precision.type"))
    if re.fullmatch(r"mixed_precision_?SR", kind):
        warn.append(
            f"precision.type={kind}: NxDT spells it in two ways, each of which a part of it refuses; both are taken "
            "here, as bf16 with fp32 master weights (their update needs no stochastic rounding)"
        )

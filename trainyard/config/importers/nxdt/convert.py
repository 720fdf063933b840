"""An NxD Training (NxDT) YAML file as a configuration of ours, so that its users need not rewrite it.

Every key is looked up in one table (nxdt_keys.py, nxdt_model_keys.py): it maps, has no effect, or is refused by name.
Where NxDT does something else than its key says, and a mapped key touches it, a warning says so: the run here does what
the key says.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainyard.config.importers.key_table import Key, Mapped, check, ignored, nearest, plain, put, row, warned
from trainyard.config.importers.nxdt import sections as parts
from trainyard.config.importers.nxdt.data import data
from trainyard.config.importers.nxdt.interpolation import resolve
from trainyard.config.importers.nxdt.keys import MANUAL, PRECISION_BY_HAND
from trainyard.config.importers.nxdt.model import hugging_face, megatron
from trainyard.config.importers.nxdt.model_keys import ANYWHERE, TABLE
from trainyard.core.errors import UserError, one_line

SECTIONS = {"trainer", "exp_manager", "distributed_strategy"}
"""Top level of every NxDT file, and of none of ours."""
DIRECT = {
    "seed": "train.seed",
    "bucket_size_collectives": "layout.bucket",
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
UNREAD = ignored("any", MANUAL)


def is_nxdt(tree: dict[str, Any]) -> bool:
    model = tree.get("model")
    own = isinstance(model, dict) and bool({"family", "from_hf"} & set(model))
    return not own and ("model_source" in tree or len(SECTIONS & set(tree)) > 1)


def from_nxdt(tree: dict[str, Any], where: str, directory: Path) -> Mapped:
    """What a file becomes here; `directory` is where it lies."""
    try:
        return _mapped(resolve(tree), directory)
    except UserError as error:
        raise UserError(f"{where}: {one_line(error)}") from None


def _mapped(tree: dict[str, Any], directory: Path) -> Mapped:
    warn: list[str] = []
    said = _said(tree, warn)
    for name, value in said.items():
        check(name, value, TABLE[name])
        warn += warned(name, value, TABLE[name])
    source = said.get("model_source")
    if source not in ("hf", "megatron"):
        raise UserError(f"model_source={plain(source)}: not one of hf, megatron; nearest: hf")
    out: dict[str, Any] = {}
    for theirs, ours in DIRECT.items():
        if said.get(theirs) is not None:
            put(out, ours, said[theirs])
    model, hint = hugging_face(said, directory, warn) if source == "hf" else megatron(said, warn)
    out["model"] = model
    for part in (parts.layout, parts.precision, parts.optimizer, parts.schedule, parts.recompute, parts.checkpoint):
        for ours, value in part(said, warn).items():
            put(out, ours, value)
    for ours, value in (data(said, warn) | parts.log(said)).items():
        put(out, ours, value)
    _defects(said, model, warn)
    unread = set() if said.get("precision.type") == "manual" else {f"precision.{name}" for name in PRECISION_BY_HAND}
    rows = [row(name, value, UNREAD if name in unread else TABLE[name], out) for name, value in said.items()]
    return Mapped(out, rows, warn, hint)


def _said(tree: dict[str, Any], warn: list[str]) -> dict[str, Any]:
    """Dotted keys that the table knows. NxDT finds some names wherever they stand, if their place says nothing."""
    said: dict[str, Any] = {}
    found = list(_leaves(tree, "", TABLE))
    for name, value in found:
        if name in TABLE:
            said[name] = value
    for name, value in found:
        if name in TABLE:
            continue
        place = ANYWHERE.get(name.rsplit(".", 1)[-1])
        if place is None:
            raise UserError(f"{name}={plain(value)}: unknown key; nearest: {nearest(name, TABLE)}")
        taken = not said.get(place)
        said[place] = value if taken else said[place]
        warn.append(
            f"{plain(name)}={plain(value)}: NxDT finds this name anywhere; its place is {place}, "
            + ("for which it is taken" if taken else f"which says {plain(said[place])} and wins")
        )
    return said


def _leaves(node: dict[str, Any], prefix: str, table: dict[str, Key]) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        dotted = prefix + name
        below = [key for each, key in table.items() if each.startswith(f"{dotted}.")]
        if dotted in table:
            yield dotted, value
        elif isinstance(value, dict) and (value or not below):
            yield from _leaves(value, f"{dotted}.", table)
        elif below and value is not None and all(key.does == "refused" for key in below):
            raise UserError(f"{dotted}: {below[0].says}")
        elif value not in (None, {}) and below:
            raise UserError(f"{dotted}={plain(value)}: not a mapping; wanted: keys such as {nearest(dotted, table)}")
        elif not below:
            yield dotted, value


def _defects(said: dict[str, Any], model: dict[str, Any], warn: list[str]) -> None:
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

"""The files of a Megatron checkpoint: which there are, and the tensors and arguments in one of them.

A root has a directory for each iteration, that one for each rank, and a text file that names the last iteration that
was saved whole. nemo-megatron names its directories otherwise and keeps a dict of another shape; both are read alike.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from trainyard.checkpoint.io.torch_file import LazyTensor, open_torch_file
from trainyard.core.errors import UserError

LATEST_FILE = "latest_checkpointed_iteration.txt"
CHECKPOINT_FILES = ("model_optim_rng.pt", "model_optim_rng.ckpt")
RANK_DIRECTORY = re.compile(r"(mp|tp)_rank_(\d+)(?:_(?:pp_rank_)?(\d+))?")
CONTAINER_PREFIX = re.compile(r"^((model|module|language_model|embedding|encoder|transformer|decoder)\.)+")
NON_WEIGHT_BUFFERS = re.compile(r"(inv_freq|masked_bias|_extra_state)$")
"""What files hold besides weights."""
NAME_ALIASES = {
    "final_norm.": "final_layernorm.",
    ".attention.": ".self_attention.",
    ".input_norm.": ".input_layernorm.",
    ".post_attention_norm.": ".post_attention_layernorm.",
    ".pre_mlp_layernorm.": ".post_attention_layernorm.",
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".post_attention_layernorm.",
    ".linear_qkv.": ".query_key_value.",
    ".linear_proj.": ".dense.",
    ".linear_fc1.": ".dense_h_to_4h.",
    ".linear_fc2.": ".dense_4h_to_h.",
}
"""Names of other years and of Megatron Core, and what the AWS reference calls the same."""


@dataclass(frozen=True)
class MegatronFiles:
    """The files of one iteration, by tensor-parallel rank and pipeline stage."""

    grid: dict[tuple[int, int], Path]
    tp: int
    pp: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MegatronRankFile:
    path: Path
    args: Mapping[str, Any]
    """The stored arguments."""
    version: float
    chunks: list[dict[str, LazyTensor]]
    """Tensors of each virtual stage, by name."""


def find_megatron(path: str | Path) -> MegatronFiles | None:
    """What a root, an iteration's directory, a rank's directory or one of the files stand for; None: not Megatron's."""
    path = Path(path).expanduser()
    if path.is_file():
        if RANK_DIRECTORY.fullmatch(path.parent.name):
            return _find_rank_files(path.parent.parent, path.name)
        return MegatronFiles({(0, 0): path}, 1, 1) if path.name in CHECKPOINT_FILES else None
    if not path.is_dir():
        return None
    for name in CHECKPOINT_FILES:
        if (path / name).is_file():
            return find_megatron(path / name)
        if found := _find_rank_files(path, name):
            return found
    return _latest_iteration(path)


def _find_rank_files(directory: Path, name: str) -> MegatronFiles | None:
    """The files called `name` of all ranks in an iteration's directory."""
    grid, pattern = {}, "mp_rank_{:02d}"
    for entry in sorted(directory.iterdir()):
        if (match := RANK_DIRECTORY.fullmatch(entry.name)) and (entry / name).is_file():
            grid[int(match[2]), int(match[3] or 0)] = entry / name
            if match[3]:
                pattern = "tp_rank_{:02d}_pp_rank_{:03d}" if match[1] == "tp" else "mp_rank_{:02d}_{:03d}"
    if not grid:
        return None
    tp, pp = (1 + max(place[axis] for place in grid) for axis in (0, 1))
    missing = [pattern.format(*place) for place in product(range(tp), range(pp)) if place not in grid]
    if missing:
        raise UserError(f"{directory}: {name} is missing in {', '.join(missing)} (tp={tp} x pp={pp} ranks)")
    return MegatronFiles(grid, tp, pp)


def _latest_iteration(root: Path) -> MegatronFiles | None:
    """The iteration that the text file names; where its directory is gone, the newest that is whole."""
    text = (root / LATEST_FILE).read_text(errors="replace").strip() if (root / LATEST_FILE).is_file() else None
    iterations = sorted((each for each in root.glob("iter_*") if each.is_dir()), reverse=True)
    if text is None and not iterations:
        return None
    named = root / (f"iter_{int(text):07d}" if text and text.isdecimal() else "release")
    if named.is_dir():
        if (named / ".metadata").is_file():
            raise UserError(f"{named}: a distributed checkpoint (torch_dist); save it with --ckpt-format torch")
        if found := find_megatron(named):
            return found
    problem = f"{root / LATEST_FILE}: " + ("no such file" if text is None else f"names {text}, which is not there")
    for directory in iterations:
        try:
            found = find_megatron(directory)
        except UserError as error:
            problem = str(error)
            continue
        if found:
            return replace(found, notes=(f"{problem}; {directory.name} is read",))
    raise UserError(f"{problem}; no iteration here is whole")


def open_rank_file(path: Path) -> MegatronRankFile:
    held = open_torch_file(path, allow_stubs=True)  # upstream's arguments have classes of its own among them
    if not isinstance(held, dict):
        raise UserError(f"{path}: not a Megatron checkpoint: a {type(held).__name__} where a dict was expected")
    virtual = sorted((key for key in held if re.fullmatch(r"model\d+", str(key))), key=lambda key: int(key[5:]))
    keys = [key for key in ("model", "state_dict") if key in held][:1] or virtual
    if not keys:
        raise UserError(
            f"{path}: not a Megatron checkpoint: no model in it, only {', '.join(map(str, held)) or 'nothing'}"
        )
    # nemo-megatron writes state_dict and no version; its order is that of 2.0.
    version = held.get("checkpoint_version", 2.0 if keys == ["state_dict"] else 0)
    if version not in (0, 2.0, 3.0):
        why = ": it has query, key and value in turn row by row" if version == 1.0 else ""
        raise UserError(
            f"{path}: checkpoint_version={version}{why}; 0, 2.0 and 3.0 are read; load and save it in Megatron"
        )
    said = held["args"] if isinstance(held.get("args"), dict) else held
    return MegatronRankFile(path, said, float(version), [dict(_flatten_tensors(held[key])) for key in keys])


def _flatten_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, LazyTensor]]:
    """Tensors of nested dicts by dotted name, in the spelling of the tables."""
    if isinstance(tree, LazyTensor):
        name = CONTAINER_PREFIX.sub("", prefix[:-1])
        for theirs, ours in NAME_ALIASES.items():
            name = name.replace(theirs, ours)
        if not NON_WEIGHT_BUFFERS.search(name):
            yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _flatten_tensors(value, f"{prefix}{key}.")

"""Finds, reads and writes directories of NxD checkpoints, in all layouts that NxD and NxDT have used.

    TAG/model/dp_rank_00[_ep_rank_00]_tp_rank_00_pp_rank_00.pt    NxD since 0.7; NxDT, whose tags end in .ckpt
    tp_rank_00_pp_rank_00[_dp_rank_00]/checkpoint.pt              before that
    tp_rank_00_pp_rank_00[_dp_rank_00]                            before that, with each tensor in its own file

NxD creates the file `checkpoint` of a tag before all others and the file `done` after them. A directory written here
appears under its name only when complete. Each tensor is written to all tensor-parallel ranks of a stage before the
next one, so that a mapped source is read once, in order, and only the files of one stage are open.

With expert parallelism, each expert-parallel rank's file holds its experts and copies of all other tensors. NxD's xser
leaves out the copies' data, and its converter the copies, except on the first of these ranks: they are read from there.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path

import torch

from trainyard.checkpoint.weights import WeightSource
from trainyard.core.atomic_files import atomic_directory, atomic_write_text, fsync_directory
from trainyard.core.errors import UserError
from trainyard.formats.format import LayoutHints, ProgressCallback
from trainyard.formats.hf import IGNORED_BUFFERS
from trainyard.formats.io.async_io import OrderedWorkers, prefetch, run_parallel
from trainyard.formats.io.lazy_tensor import LazyTensor
from trainyard.formats.io.torch_file import named_tensors, open_torch_file
from trainyard.formats.io.torch_writer import TorchFileWriter, XserWriter
from trainyard.formats.nxd import layout as nxd_layout
from trainyard.formats.nxd.infer_layout import infer_kv_order, infer_layout
from trainyard.formats.nxd.layout import NxdLayout, NxdRank, require_nxd_model
from trainyard.formats.nxd.names import NAME_TABLES, is_expert_tensor
from trainyard.formats.tensor_map import (
    ShardedWeights,
    StoredTensor,
    assemble,
    check_all_stored,
    check_tensors,
    find_mismatched_copy,
)
from trainyard.models import ModelConfig
from trainyard.remote.storage import resolve_new_directory

CURRENT_FILE_NAME = re.compile(
    r"dp_rank_(?P<dp>\d+)(_ep_rank_(?P<ep>\d+))?_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt"
)
OLD_FILE_NAME = re.compile(r"tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)(_dp_rank_(?P<dp>\d+))?")


@dataclass(frozen=True)
class NxdFiles:
    """The files of one NxD checkpoint."""

    root: Path
    """The directory of the files."""
    files: dict[NxdRank, Path]
    """The file of each rank, in rank order."""
    unfinished_tags: tuple[str, ...] = ()
    """Tags in the same directory whose save never finished."""


def find_nxd(path: Path) -> NxdFiles | None:
    """Find the checkpoint at `path`: a directory of files, a tag, or a directory of tags (the latest finished one)."""
    if not path.is_dir():
        return None
    if files := _find_rank_files(path):
        return files
    if _is_tag(path):
        if (path / "checkpoint").exists() and not (path / "done").exists():
            raise UserError(f"{path}: saving was interrupted (no done file); pass {path / 'model'} to read it anyway")
        return _find_rank_files(path / "model")
    tags = [tag for tag in sorted(path.iterdir()) if tag.is_dir() and _is_tag(tag)]
    if not tags:
        return None
    finished = [tag for tag in tags if (tag / "done").exists()]
    unfinished = tuple(tag.name for tag in tags if tag not in finished)
    if not finished:
        raise UserError(
            f"{path}: no finished checkpoint (no done file in {', '.join(unfinished)}); pass the path of one of them"
        )
    latest = _find_rank_files(max(finished, key=lambda tag: (tag / "done").stat().st_mtime_ns) / "model")
    return latest and replace(latest, unfinished_tags=unfinished)


class NxdWeights(ShardedWeights):
    """The weights of an NxD checkpoint, its inferred layout, and all that its files hold."""

    layout: NxdLayout
    files: NxdFiles
    rank_tensors: dict[NxdRank, dict[str, LazyTensor]]


def open_nxd(path: Path, model: ModelConfig, hints: LayoutHints | None = None) -> NxdWeights:
    """Open the weights at `path`. `hints` are fields of NxdLayout that the user knows."""
    decoder, nxd_files, hints = require_nxd_model(model), _require_nxd(path), hints or {}
    files = read_rank_files(nxd_files)
    shapes = {rank: {name: tensor.shape for name, tensor in state.items()} for rank, state in files.items()}
    root = str(nxd_files.root)
    try:
        layout = infer_layout(decoder, shapes, hints)
    except UserError as error:
        raise UserError(f"{root}: {error}") from None
    embedding, head = NAME_TABLES[layout.style].embedding, NAME_TABLES[layout.style].output

    def stored_tensors() -> Iterator[tuple[NxdRank, list[StoredTensor]]]:
        """The tensors of each rank at the current `layout`. NxD stores a tied head twice, other tools once."""
        for rank, tensors in nxd_layout.rank_tensors(decoder, layout).items():
            has_head = head in files[rank] or not decoder.tie_embeddings
            yield rank, [stored for stored in tensors if stored.name != head or has_head]

    def mismatched_copy(candidate: NxdLayout, layer: int) -> str | None:
        (pp,) = (pp for pp in range(candidate.pp) if layer in nxd_layout.pp_rank_layers(decoder, candidate, pp))
        sharded = nxd_layout.qkv_tensors(decoder, candidate, layer)
        return find_mismatched_copy(
            (stored, files[NxdRank(pp, 0, tp)][stored.name]) for shards in sharded for tp, stored in enumerate(shards)
        )

    for rank, expected in stored_tensors():
        by_name = {stored.name: stored for stored in expected}
        check_tensors(f"{nxd_files.files[rank]}:", by_name, files[rank], IGNORED_BUFFERS.search)
    try:
        layout, note = infer_kv_order(decoder, layout, hints.get("kv_order"), mismatched_copy)
    except UserError as error:
        raise UserError(f"{root}: {error}") from None
    tensors = [(stored, files[rank][stored.name]) for rank, on_rank in stored_tensors() for stored in on_rank]
    if decoder.tie_embeddings and find_mismatched_copy(pair for pair in tensors if pair[0].name in (embedding, head)):
        raise UserError(f"{root}: the copies of {head} differ; model.tie_embeddings=true does not fit")
    weights = NxdWeights(decoder, tensors, partial(nxd_layout.is_replicated, layout))
    weights.layout, weights.files, weights.rank_tensors = layout, nxd_files, files
    weights.location = root
    skipped = (f"skipping {tag}: its save never finished" for tag in nxd_files.unfinished_tags)
    weights.notes = (*skipped, *([f"{root}: {note}"] if note else []))
    return weights


def write_nxd(
    directory: Path,
    weights: WeightSource,
    layout: NxdLayout,
    dtype: torch.dtype | None = None,
    xser: bool = False,
    progress: ProgressCallback = lambda size: None,
    write_extra_files: Callable[[Path], None] = lambda directory: None,
) -> None:
    """Write `directory`/model/... as NxD's save_checkpoint does. `dtype` None keeps the dtypes of `weights`.

    `write_extra_files` adds files to the directory before it gets its name.
    """
    model = require_nxd_model(weights.model)
    nxd_layout.check_layout(model, layout)
    on_ranks = nxd_layout.rank_tensors(model, layout).values()
    check_all_stored(model, chain.from_iterable(on_ranks), "NxD's names")
    with _atomic_checkpoint(directory) as folder:
        for pp, ep in product(range(layout.pp), range(layout.ep)):
            names = [_rank_file_name(NxdRank(pp, ep, tp), layout.ep) for tp in range(layout.tp)]
            with _open_writers([folder / name for name in names], xser, layout.ep) as writers:
                targets = [
                    (writer, stored)
                    for shards in nxd_layout.stage_tensors(model, layout, pp, ep)
                    for writer, stored in zip(writers, shards, strict=True)
                ]
                tensors = prefetch(partial(assemble, stored, weights, dtype) for _, stored in targets)
                with OrderedWorkers() as workers:
                    for i, ((writer, stored), tensor) in enumerate(zip(targets, tensors, strict=True)):
                        workers.submit(i % layout.tp, partial(writer.add, stored.name, tensor))
                        progress(tensor.nbytes)
        write_extra_files(folder.parent)


def repack_nxd(path: Path, directory: Path, xser: bool) -> None:
    """Rewrite a checkpoint with or without xser, with the current file names. This needs no model."""
    nxd_files = _require_nxd(path)
    ep = max(rank.ep for rank in nxd_files.files) + 1
    with _atomic_checkpoint(directory) as folder:
        for rank, tensors in read_rank_files(nxd_files).items():
            with _open_writers([folder / _rank_file_name(rank, ep)], xser, ep) as (writer,):
                for name, tensor in tensors.items():
                    writer.add(name, tensor.read())


def read_rank_files(nxd_files: NxdFiles) -> dict[NxdRank, dict[str, LazyTensor]]:
    """The tensors of all files by rank and name. What the file of an expert-parallel rank leaves out is that of the
    first one, whose order it gets: NxD finds shared tensors of xser there by number."""
    files = {rank: _read_rank_file(file) for rank, file in nxd_files.files.items()}
    for rank, tensors in files.items():
        if rank.ep:
            first = files[rank._replace(ep=0)]
            shared = {name: tensor for name, tensor in first.items() if not is_expert_tensor(name)}
            own = {name: tensor for name, tensor in tensors.items() if is_expert_tensor(name) or tensor.exists}
            merged = shared | own
            files[rank] = {name: merged[name] for name in first | own if name in merged}
    return files


def _read_rank_file(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a rank's file by name. The state dict is the file's object, or its entry `model`."""
    state = open_torch_file(path, allow_stubs=True)  # old files also hold the arguments of the run
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        state = state["model"]
    if tensors := named_tensors(state):
        return tensors
    raise UserError(f"{path}: holds no tensors by name; expected the state dict of a rank, or one under 'model'")


def _require_nxd(path: Path) -> NxdFiles:
    if (files := find_nxd(path)) is None:
        raise UserError(
            f"{path}: no NxD checkpoint; expected a file such as model/{_rank_file_name(NxdRank(0, 0, 0), 1)}"
        )
    return files


def _is_tag(path: Path) -> bool:
    model = path / "model"
    return model.is_dir() and any(CURRENT_FILE_NAME.fullmatch(file.name) for file in model.iterdir())


def _find_rank_files(folder: Path) -> NxdFiles | None:
    found = find_rank_files(folder, CURRENT_FILE_NAME, OLD_FILE_NAME)
    if not found:
        return None
    pp, ep, tp = (range(max(ranks) + 1) for ranks in zip(*found, strict=True))
    grid = [NxdRank(*rank) for rank in product(pp, ep, tp)]
    check_complete(folder, "ranks", {rank_name(rank, len(ep)): rank in found for rank in grid})
    # The first data-parallel rank; the others hold the same weights.
    return NxdFiles(folder, {rank: next(iter(found[rank].values())) for rank in grid})


def find_rank_files(folder: Path, *patterns: re.Pattern[str]) -> dict[NxdRank, dict[int, Path]]:
    """The files in `folder` with such names, by rank and data-parallel rank, in order of their names."""
    files: dict[NxdRank, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = next(filter(None, (pattern.fullmatch(path.name) for pattern in patterns)), None)
        if not match:  # such as the .tensors and .info.pt files of xser
            continue
        numbers = {key: int(value or 0) for key, value in match.groupdict().items()}
        rank = NxdRank(numbers.get("pp", 0), numbers.get("ep", 0), numbers["tp"])
        file = path / "checkpoint.pt" if path.is_dir() else path
        if file.is_file():
            files.setdefault(rank, {}).setdefault(numbers["dp"], file)
    return files


def check_complete(folder: Path, what: str, exists: Mapping[str, bool]) -> None:
    """Refuse a checkpoint with missing files, by name."""
    if missing := [name for name, found in exists.items() if not found]:
        names = f"{', '.join(missing[:4])}{' and others' if len(missing) > 4 else ''}"
        raise UserError(f"{folder}: {len(missing)} of {len(exists)} {what} are missing: {names}")


def rank_name(rank: NxdRank, ep: int) -> str:
    """The name of a rank, of `ep` expert-parallel ranks."""
    return f"{f'ep_rank_{rank.ep:02d}_' if ep > 1 else ''}tp_rank_{rank.tp:02d}_pp_rank_{rank.pp:02d}"


def _rank_file_name(rank: NxdRank, ep: int) -> str:
    return f"dp_rank_00_{rank_name(rank, ep)}.pt"


@contextmanager
def _open_writers(paths: list[Path], xser: bool, ep: int) -> Iterator[list[TorchFileWriter | XserWriter]]:
    """Open a writer for each path. All files are complete if the block succeeds."""
    writers: list[TorchFileWriter | XserWriter] = []
    try:
        for path in paths:
            is_expert = is_expert_tensor if ep > 1 else lambda name: False
            writers.append(XserWriter(path, is_expert) if xser else TorchFileWriter(path))
        yield writers
        run_parallel(writer.close for writer in writers)
    finally:
        for writer in writers:
            writer.abandon()


@contextmanager
def _atomic_checkpoint(directory: Path) -> Iterator[Path]:
    """Yield a folder for model files. If the block succeeds, it becomes `directory`/model of a finished checkpoint."""
    with atomic_directory(resolve_new_directory(directory)) as temporary:
        atomic_write_text(temporary / "checkpoint", "1")
        folder = temporary / "model"
        folder.mkdir()
        yield folder
        fsync_directory(folder)
        atomic_write_text(temporary / "done", "1")

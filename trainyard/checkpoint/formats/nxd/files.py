"""Finds, reads and writes directories of NxD checkpoints, in all layouts that NxD and NxDT have used.

    TAG/model/dp_rank_00[_ep_rank_00]_tp_rank_00_pp_rank_00.pt    NxD since 0.7; NxDT, whose tags end in .ckpt
    tp_rank_00_pp_rank_00[_dp_rank_00]/checkpoint.pt              before that
    tp_rank_00_pp_rank_00[_dp_rank_00]                            before that, with each tensor in its own file

NxD creates the file `checkpoint` of a tag before all others and the file `done` after them. A directory written here
appears under its name only when complete. Each tensor is written to all tensor-parallel ranks of a stage before the
next one, so that a mapped source is read once, in order, and only the files of one stage are open.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from trainyard.checkpoint.formats.nxd import layout as nxd_layout
from trainyard.checkpoint.formats.nxd.infer_layout import LayoutHints, infer_kv_order, infer_layout
from trainyard.checkpoint.formats.nxd.layout import NxdLayout, PpTpRank, require_llama
from trainyard.checkpoint.formats.nxd.names import NAME_TABLES
from trainyard.checkpoint.formats.nxd.validate import (
    RankFiles,
    RankTensors,
    check_rank_files,
    find_mismatched_copy,
    index_reader,
)
from trainyard.checkpoint.formats.tensor_map import ShardedWeights, StoredTensor, WeightSource, assemble
from trainyard.checkpoint.io.async_io import OrderedWorkers, prefetch, run_parallel
from trainyard.checkpoint.io.storage import resolve_new_directory
from trainyard.checkpoint.io.torch_file import LazyTensor, open_torch_file
from trainyard.checkpoint.io.torch_writer import TorchFileWriter, XserWriter
from trainyard.config.model_schema import LlamaConfig
from trainyard.core.atomic_files import atomic_directory, atomic_write_text, fsync_directory
from trainyard.core.errors import UserError
from trainyard.models import AnyModelConfig

CURRENT_FILE_NAME = re.compile(
    r"dp_rank_(?P<dp>\d+)(_ep_rank_(?P<ep>\d+))?_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt"
)
OLD_FILE_NAME = re.compile(r"tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)(_dp_rank_(?P<dp>\d+))?")
ProgressCallback = Callable[[int], None]
"""Called with the bytes of each tensor that was written."""


@dataclass(frozen=True)
class NxdFiles:
    """The files of one NxD checkpoint."""

    root: Path
    """The directory of the files."""
    files: dict[PpTpRank, Path]
    """The file of each rank, in rank order."""
    xser: bool
    """Tensors are in separate files (torch-xla's serialization)."""
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


class NxdWeights(ShardedWeights[PpTpRank]):
    """The weights of an NxD checkpoint, and its inferred layout."""

    def __init__(self, model: LlamaConfig, layout: NxdLayout, files: RankFiles, tensors: RankTensors) -> None:
        super().__init__(model, tensors, index_reader(files), lambda rank, name: files[rank][name].dtype)
        self.layout = layout


def open_nxd(
    path: Path, model: AnyModelConfig, hints: LayoutHints | None = None, verify_copies: bool = False
) -> NxdWeights:
    """Open the weights at `path`. `hints` are fields of NxdLayout that the user knows.

    `verify_copies` also reads all replicas and refuses the checkpoint if they differ.
    """
    llama, nxd_files, hints = require_llama(model), _require_nxd(path), hints or {}
    files = {rank: read_rank_file(file) for rank, file in nxd_files.files.items()}
    shapes = {rank: {name: tensor.shape for name, tensor in state.items()} for rank, state in files.items()}
    root = str(nxd_files.root)
    layout = infer_layout(root, llama, shapes, hints)
    embedding, head = NAME_TABLES[layout.style].embedding, NAME_TABLES[layout.style].output

    def tensors() -> RankTensors:
        """All stored tensors at the current `layout`. NxD stores a tied head twice, other tools once."""
        for rank, on_rank in nxd_layout.rank_tensors(llama, layout).items():
            for stored in on_rank:
                if stored.name != head or head in files[rank] or not llama.tie_embeddings:
                    yield rank, stored

    def copies_agree(candidate: NxdLayout, layer: int) -> bool:
        (pp,) = (pp for pp in range(candidate.pp) if layer in nxd_layout.pp_rank_layers(llama, candidate, pp))
        sharded = nxd_layout.qkv_tensors(llama, candidate, layer)
        return not find_mismatched_copy(
            files, (((pp, tp), stored) for shards in sharded for tp, stored in enumerate(shards))
        )

    check_rank_files(nxd_files.files, files, tensors())
    layout = infer_kv_order(root, llama, layout, hints, copies_agree)
    compared = tensors()
    if not verify_copies:
        tied = (embedding, head) if llama.tie_embeddings else ()
        compared = ((rank, stored) for rank, stored in tensors() if stored.name in tied)
    if name := find_mismatched_copy(files, compared):
        is_tied_head = name == head and llama.tie_embeddings
        reason = "model.tie_embeddings=true does not fit" if is_tied_head else "the ranks have diverged"
        raise UserError(f"{root}: the copies of {name} differ; {reason}")
    return NxdWeights(llama, layout, files, tensors())


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
    model = require_llama(weights.model)
    nxd_layout.check_layout(model, layout)
    with _atomic_checkpoint(directory) as folder:
        for pp in range(layout.pp):
            with _open_writers([folder / _rank_file_name(tp, pp) for tp in range(layout.tp)], xser) as writers:
                targets = [
                    (writer, stored)
                    for shards in nxd_layout.stage_tensors(model, layout, pp)
                    for writer, stored in zip(writers, shards, strict=True)
                ]
                tensors = prefetch(partial(_assemble_as, stored, weights, dtype) for _, stored in targets)
                with OrderedWorkers() as workers:
                    for i, ((writer, stored), tensor) in enumerate(zip(targets, tensors, strict=True)):
                        workers.submit(i % layout.tp, partial(writer.add, stored.name, tensor))
                        progress(tensor.nbytes)
        write_extra_files(folder.parent)


def repack_nxd(path: Path, directory: Path, xser: bool, progress: ProgressCallback = lambda size: None) -> None:
    """Rewrite a checkpoint with or without xser, with the current file names. This needs no model."""
    nxd_files = _require_nxd(path)
    with _atomic_checkpoint(directory) as folder:
        for (pp, tp), file in nxd_files.files.items():
            with _open_writers([folder / _rank_file_name(tp, pp)], xser) as (writer,):
                for name, lazy in read_rank_file(file).items():
                    tensor = lazy.read()
                    writer.add(name, tensor)
                    progress(tensor.nbytes)


def read_rank_file(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a rank's file by name. The state dict is the file's object, or its entry `model`."""
    state = open_torch_file(path, allow_stubs=True)  # old files also hold the arguments of the run
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        state = state["model"]
    items = state.items() if isinstance(state, dict) else ()
    tensors = {name: tensor for name, tensor in items if isinstance(name, str) and isinstance(tensor, LazyTensor)}
    if not tensors:
        raise UserError(f"{path}: holds no tensors by name; expected the state dict of a rank, or one under 'model'")
    return tensors


def _assemble_as(stored: StoredTensor, weights: WeightSource, dtype: torch.dtype | None) -> torch.Tensor:
    return assemble(stored, weights).to(dtype)


def _require_nxd(path: Path) -> NxdFiles:
    if (files := find_nxd(path)) is None:
        raise UserError(f"{path}: no NxD checkpoint; expected a file such as model/{_rank_file_name(0, 0)}")
    return files


def _is_tag(path: Path) -> bool:
    model = path / "model"
    return model.is_dir() and any(CURRENT_FILE_NAME.fullmatch(file.name) for file in model.iterdir())


def _find_rank_files(folder: Path) -> NxdFiles | None:
    files: dict[PpTpRank, Path] = {}
    for path in sorted(folder.iterdir()):  # the first data-parallel rank comes first; the others hold the same weights
        match = CURRENT_FILE_NAME.fullmatch(path.name) or OLD_FILE_NAME.fullmatch(path.name)
        if not match:
            continue
        if int(match.groupdict().get("ep") or 0):
            raise UserError(f"{path}: file of an expert-parallel rank; Llama models have no experts")
        file = path / "checkpoint.pt" if path.is_dir() else path
        if file.is_file():
            files.setdefault((int(match["pp"]), int(match["tp"])), file)
    if not files:
        return None
    pp, tp = (max(ranks) + 1 for ranks in zip(*files, strict=True))
    grid = [(p, t) for p in range(pp) for t in range(tp)]
    if missing := [rank for rank in grid if rank not in files]:
        names = ", ".join(f"tp_rank_{t:02d}_pp_rank_{p:02d}" for p, t in missing[:4])
        more = " and others" if len(missing) > 4 else ""
        raise UserError(f"{folder}: {len(missing)} of {len(grid)} ranks are missing: {names}{more}")
    xser = any(file.with_name(f"{file.name}.tensors").is_dir() for file in files.values())
    return NxdFiles(folder, {rank: files[rank] for rank in grid}, xser)


def _rank_file_name(tp: int, pp: int) -> str:
    return f"dp_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


@contextmanager
def _open_writers(paths: list[Path], xser: bool) -> Iterator[list[TorchFileWriter | XserWriter]]:
    """Open a writer for each path. All files are complete if the block succeeds; none is left if it raises."""
    writers: list[TorchFileWriter | XserWriter] = []
    try:
        for path in paths:
            writers.append(XserWriter(path) if xser else TorchFileWriter(path))
        yield writers
        run_parallel(writer.close for writer in writers)
    except BaseException:
        for writer in writers:
            writer.abandon()
        raise


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

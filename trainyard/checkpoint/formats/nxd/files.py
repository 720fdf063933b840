"""Directories of NxD checkpoints: found as NxD and NxDT have left them over the years, read, written.

    TAG/model/dp_rank_00[_ep_rank_00]_tp_rank_00_pp_rank_00.pt    NxD since 0.7; NxDT, whose tags end in .ckpt
    tp_rank_00_pp_rank_00[_dp_rank_00]/checkpoint.pt              before that
    tp_rank_00_pp_rank_00[_dp_rank_00]                            before that, with its tensors in files of their own

NxD makes a tag's `checkpoint` file before all others and its `done` file after them. A directory that we write appears
whole or not at all. Every tensor goes to all tensor-parallel ranks of a stage before the next one, so that a mapped
source is gone through once and at most one stage's files are open.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from trainyard.checkpoint.formats.nxd import layout as nxd_layout
from trainyard.checkpoint.formats.nxd.infer_layout import LayoutHints, infer_kv_order, infer_layout
from trainyard.checkpoint.formats.nxd.layout import NxdLayout, PpTpRank
from trainyard.checkpoint.formats.nxd.names import NAME_TABLES
from trainyard.checkpoint.formats.nxd.validate import (
    RankFiles,
    RankTensors,
    check_tensors,
    find_mismatched_copy,
    index_reader,
)
from trainyard.checkpoint.formats.tensor_map import ShardedWeights, StoredTensor, WeightSource, assemble, unfused_shapes
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
"""Called with the bytes of each tensor written."""


@dataclass(frozen=True)
class NxdFiles:
    root: Path
    """The directory that the files are in."""
    files: dict[PpTpRank, Path]
    """In the order of ranks."""
    xser: bool
    """Some tensors are in files of their own."""
    unfinished_tags: tuple[str, ...] = ()
    """Tags beside it that were never finished."""


def find_nxd(path: Path) -> NxdFiles | None:
    """The checkpoint in `path`: a directory of files, a tag with one in it, or the newest finished tag."""
    if not path.is_dir():
        return None
    if found := _find_rank_files(path):
        return found
    if _is_tag(path):
        if (path / "checkpoint").exists() and not (path / "done").exists():
            raise UserError(f"{path}: saving was interrupted (no done file); give {path / 'model'} to read it anyway")
        return _find_rank_files(path / "model")
    tags = [tag for tag in sorted(path.iterdir()) if tag.is_dir() and _is_tag(tag)]
    if not tags:
        return None
    finished = [tag for tag in tags if (tag / "done").exists()]
    skipped = tuple(tag.name for tag in tags if tag not in finished)
    if not finished:
        raise UserError(
            f"{path}: no finished checkpoint (no done file in {', '.join(skipped)}); give one of them itself"
        )
    newest = _find_rank_files(max(finished, key=lambda tag: (tag / "done").stat().st_mtime_ns) / "model")
    return newest and replace(newest, unfinished_tags=skipped)


class NxdWeights(ShardedWeights[PpTpRank]):
    """Weights in an NxD checkpoint, and the layout that it turned out to have."""

    def __init__(self, model: LlamaConfig, layout: NxdLayout, files: RankFiles, tensors: RankTensors) -> None:
        super().__init__(model, tensors, index_reader(files), lambda rank, name: files[rank][name].dtype)
        self.layout = layout


def open_nxd(
    path: Path, model: AnyModelConfig, hints: LayoutHints | None = None, verify_copies: bool = False
) -> NxdWeights:
    """The weights at `path`; `hints` are fields of NxdLayout that the user gave.

    `verify` also reads every copy of what several ranks hold, and wants them equal.
    """
    llama, found, hints = _require_llama(model), _require_nxd(path), hints or {}
    files = {rank: read_rank_file(file) for rank, file in found.files.items()}
    shapes = {rank: {name: lazy.shape for name, lazy in state.items()} for rank, state in files.items()}
    where, parts = str(found.root), unfused_shapes(llama)
    layout = infer_layout(where, llama, shapes, hints)
    embedding, head = NAME_TABLES[layout.style].embedding, NAME_TABLES[layout.style].output

    def held() -> RankTensors:
        for rank, stored in nxd_layout.rank_tensors(llama, layout).items():
            for each in stored:
                if (
                    each.name != head or head in files[rank] or not llama.tie_embeddings
                ):  # NxD has a tied head twice, others once
                    yield rank, each

    def agree(way: NxdLayout, layer: int) -> bool:
        (pp,) = (pp for pp in range(way.pp) if layer in nxd_layout.pp_rank_layers(llama, way, pp))
        groups = nxd_layout.qkv_tensors(llama, way, layer)
        return not find_mismatched_copy(
            files, (((pp, tp), each) for group in groups for tp, each in enumerate(group)), parts
        )

    check_tensors(found.files, files, held(), parts)
    layout = infer_kv_order(where, llama, layout, hints, agree)
    copies = (
        held()
        if verify_copies
        else (pair for pair in held() if llama.tie_embeddings and pair[1].name in (embedding, head))
    )
    if name := find_mismatched_copy(files, copies, parts):
        why = (
            "tied: true does not hold for it"
            if name == head and llama.tie_embeddings
            else "its ranks have drifted apart"
        )
        raise UserError(f"{where}: {name} is not the same wherever it is held; {why}")
    return NxdWeights(llama, layout, files, held())


def write_nxd(
    directory: Path,
    weights: WeightSource,
    layout: NxdLayout,
    dtype: torch.dtype | None = None,
    xser: bool = False,
    progress: ProgressCallback = lambda size: None,
    write_extra_files: Callable[[Path], None] = lambda directory: None,
) -> None:
    """Write `directory`/model/... as NxD's save_checkpoint does; each tensor in `dtype`, or the one it has. `also` puts
    other files beside model/ before it is complete."""
    model = _require_llama(weights.model)
    nxd_layout.check_layout(model, layout)
    parts = unfused_shapes(model)
    with _atomic_checkpoint(directory) as folder:
        for pp in range(layout.pp):
            with _open_writers([folder / _rank_file_name(tp, pp) for tp in range(layout.tp)], xser) as writers:
                held = [
                    (writer, each)
                    for group in nxd_layout.stage_tensors(model, layout, pp)
                    for writer, each in zip(writers, group, strict=True)
                ]
                made = prefetch(partial(_assemble_as, each, parts, weights, dtype) for _, each in held)
                with OrderedWorkers() as lanes:
                    for number, ((writer, each), tensor) in enumerate(zip(held, made, strict=True)):
                        lanes.submit(number % layout.tp, partial(writer.add, each.name, tensor))
                        progress(tensor.nbytes)
        write_extra_files(folder.parent)


def repack_nxd(path: Path, directory: Path, xser: bool, progress: ProgressCallback = lambda size: None) -> None:
    """The same tensors in the other kind of file (xser or not), and in today's layout; no model is needed for that."""
    found = _require_nxd(path)
    with _atomic_checkpoint(directory) as folder:
        for (pp, tp), file in found.files.items():
            with _open_writers([folder / _rank_file_name(tp, pp)], xser) as (writer,):
                for name, lazy in read_rank_file(file).items():
                    tensor = lazy.read()
                    writer.add(name, tensor)
                    progress(tensor.nbytes)


def read_rank_file(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a rank's file by name, on their own or under `model`."""
    state = open_torch_file(path, allow_stubs=True)  # old ones have a run's arguments beside the weights
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        state = state["model"]
    tensors = state.items() if isinstance(state, dict) else ()
    held = {name: lazy for name, lazy in tensors if isinstance(name, str) and isinstance(lazy, LazyTensor)}
    if not held:
        raise UserError(f"{path}: holds no tensors by name; a rank's state dict was expected, bare or under 'model'")
    return held


def _assemble_as(
    stored: StoredTensor, shapes: Mapping[str, tuple[int, ...]], weights: WeightSource, dtype: torch.dtype | None
) -> torch.Tensor:
    return assemble(stored, shapes, weights).to(dtype)


def _require_nxd(path: Path) -> NxdFiles:
    found = find_nxd(path)
    if found is None:
        raise UserError(f"{path}: no NxD checkpoint here; wanted model/{_rank_file_name(0, 0)} or the like")
    return found


def _require_llama(model: AnyModelConfig) -> LlamaConfig:
    if not isinstance(model, LlamaConfig):
        raise UserError(f"model.family={model.family}: NxD checkpoints hold Llama models here; use family: llama")
    return model


def _is_tag(path: Path) -> bool:
    model = path / "model"
    return model.is_dir() and any(CURRENT_FILE_NAME.fullmatch(file.name) for file in model.iterdir())


def _find_rank_files(folder: Path) -> NxdFiles | None:
    files: dict[PpTpRank, Path] = {}
    for path in sorted(folder.iterdir()):  # the first data-parallel rank comes first; others have the same weights
        match = CURRENT_FILE_NAME.fullmatch(path.name) or OLD_FILE_NAME.fullmatch(path.name)
        if not match:
            continue
        if int(match.groupdict().get("ep") or 0):
            raise UserError(f"{path}: expert-parallel ranks hold a mixture of experts; Llama models have none")
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
    """A file for each path, all finished when the block ends well, all gone when it does not."""
    made: list[TorchFileWriter | XserWriter] = []
    try:
        for path in paths:
            made.append(XserWriter(path) if xser else TorchFileWriter(path))
        yield made
        run_parallel(writer.close for writer in made)
    except BaseException:
        for writer in made:
            writer.abandon()
        raise


@contextmanager
def _atomic_checkpoint(directory: Path) -> Iterator[Path]:
    """A folder for model files; when the block ends well, it is `directory`/model, marked complete."""
    with atomic_directory(resolve_new_directory(directory)) as part:
        atomic_write_text(part / "checkpoint", "1")
        folder = part / "model"
        folder.mkdir()
        yield folder
        fsync_directory(folder)
        atomic_write_text(part / "done", "1")

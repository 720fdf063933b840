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
from trainyard.checkpoint.formats.nxd.infer_layout import Hints, infer, with_kv_order
from trainyard.checkpoint.formats.nxd.layout import NxdLayout, Rank
from trainyard.checkpoint.formats.nxd.names import STYLES
from trainyard.checkpoint.formats.nxd.validate import Files, Held, check_names, differing, reader
from trainyard.checkpoint.formats.tensor_map import Scattered, Stored, Weights, put_together, shapes_of
from trainyard.checkpoint.io.async_io import Lanes, ahead, all_together
from trainyard.checkpoint.io.storage import new_directory
from trainyard.checkpoint.io.torch_file import Lazy, open_pickle
from trainyard.checkpoint.io.torch_writer import PickleWriter, XserWriter
from trainyard.config.model_schema import LlamaModel
from trainyard.core.atomic_files import sync_directory, whole_directory, write_whole
from trainyard.core.errors import UserError
from trainyard.models import AnyModel

NOW = re.compile(r"dp_rank_(?P<dp>\d+)(_ep_rank_(?P<ep>\d+))?_tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)\.pt")
ONCE = re.compile(r"tp_rank_(?P<tp>\d+)_pp_rank_(?P<pp>\d+)(_dp_rank_(?P<dp>\d+))?")
Progress = Callable[[int], None]
"""Called with the bytes of each tensor written."""


@dataclass(frozen=True)
class NxdFound:
    root: Path
    """The directory that the files are in."""
    files: dict[Rank, Path]
    """In the order of ranks."""
    xser: bool
    """Some tensors are in files of their own."""
    skipped: tuple[str, ...] = ()
    """Tags beside it that were never finished."""


def find_nxd(path: Path) -> NxdFound | None:
    """The checkpoint in `path`: a directory of files, a tag with one in it, or the newest finished tag."""
    if not path.is_dir():
        return None
    if found := _files_in(path):
        return found
    if _is_tag(path):
        if (path / "checkpoint").exists() and not (path / "done").exists():
            raise UserError(f"{path}: saving was interrupted (no done file); give {path / 'model'} to read it anyway")
        return _files_in(path / "model")
    tags = [tag for tag in sorted(path.iterdir()) if tag.is_dir() and _is_tag(tag)]
    if not tags:
        return None
    finished = [tag for tag in tags if (tag / "done").exists()]
    skipped = tuple(tag.name for tag in tags if tag not in finished)
    if not finished:
        raise UserError(
            f"{path}: no finished checkpoint (no done file in {', '.join(skipped)}); give one of them itself"
        )
    newest = _files_in(max(finished, key=lambda tag: (tag / "done").stat().st_mtime_ns) / "model")
    return newest and replace(newest, skipped=skipped)


class NxdWeights(Scattered[Rank]):
    """Weights in an NxD checkpoint, and the layout that it turned out to have."""

    def __init__(self, model: LlamaModel, layout: NxdLayout, files: Files, held: Held) -> None:
        super().__init__(model, held, reader(files), lambda rank, name: files[rank][name].dtype)
        self.layout = layout


def open_nxd(path: Path, model: AnyModel, hints: Hints | None = None, verify: bool = False) -> NxdWeights:
    """The weights at `path`; `hints` are fields of NxdLayout that the user gave.

    `verify` also reads every copy of what several ranks hold, and wants them equal.
    """
    llama, found, hints = _llama(model), _find(path), hints or {}
    files = {rank: read_state(file) for rank, file in found.files.items()}
    shapes = {rank: {name: lazy.shape for name, lazy in state.items()} for rank, state in files.items()}
    where, parts = str(found.root), shapes_of(llama)
    layout = infer(where, llama, shapes, hints)
    embedding, head = STYLES[layout.style].embedding, STYLES[layout.style].output

    def held() -> Held:
        for rank, stored in nxd_layout.stored(llama, layout).items():
            for each in stored:
                if each.name != head or head in files[rank] or not llama.tied:  # NxD has a tied head twice, others once
                    yield rank, each

    def agree(way: NxdLayout, layer: int) -> bool:
        (pp,) = (pp for pp in range(way.pp) if layer in nxd_layout.layers_of(llama, way, pp))
        groups = nxd_layout.attention_inputs(llama, way, layer)
        return not differing(files, (((pp, tp), each) for group in groups for tp, each in enumerate(group)), parts)

    check_names(found.files, files, held(), parts)
    layout = with_kv_order(where, llama, layout, hints, agree)
    copies = held() if verify else (pair for pair in held() if llama.tied and pair[1].name in (embedding, head))
    if name := differing(files, copies, parts):
        why = "tied: true does not hold for it" if name == head and llama.tied else "its ranks have drifted apart"
        raise UserError(f"{where}: {name} is not the same wherever it is held; {why}")
    return NxdWeights(llama, layout, files, held())


def write_nxd(
    directory: Path,
    weights: Weights,
    layout: NxdLayout,
    dtype: torch.dtype | None = None,
    xser: bool = False,
    progress: Progress = lambda size: None,
    also: Callable[[Path], None] = lambda directory: None,
) -> None:
    """Write `directory`/model/... as NxD's save_checkpoint does; each tensor in `dtype`, or the one it has. `also` puts
    other files beside model/ before it is complete."""
    model = _llama(weights.model)
    nxd_layout.check(model, layout)
    parts = shapes_of(model)
    with _new_checkpoint(directory) as folder:
        for pp in range(layout.pp):
            with _writers([folder / _file(tp, pp) for tp in range(layout.tp)], xser) as writers:
                held = [
                    (writer, each)
                    for group in nxd_layout.tensors(model, layout, pp)
                    for writer, each in zip(writers, group, strict=True)
                ]
                made = ahead(partial(_made, each, parts, weights, dtype) for _, each in held)
                with Lanes() as lanes:
                    for number, ((writer, each), tensor) in enumerate(zip(held, made, strict=True)):
                        lanes.put(number % layout.tp, partial(writer.add, each.name, tensor))
                        progress(tensor.nbytes)
        also(folder.parent)


def repack_nxd(path: Path, directory: Path, xser: bool, progress: Progress = lambda size: None) -> None:
    """The same tensors in the other kind of file (xser or not), and in today's layout; no model is needed for that."""
    found = _find(path)
    with _new_checkpoint(directory) as folder:
        for (pp, tp), file in found.files.items():
            with _writers([folder / _file(tp, pp)], xser) as (writer,):
                for name, lazy in read_state(file).items():
                    tensor = lazy.read()
                    writer.add(name, tensor)
                    progress(tensor.nbytes)


def read_state(path: Path) -> dict[str, Lazy]:
    """The tensors of a rank's file by name, on their own or under `model`."""
    state = open_pickle(path, inert=True)  # old ones have a run's arguments beside the weights
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        state = state["model"]
    tensors = state.items() if isinstance(state, dict) else ()
    held = {name: lazy for name, lazy in tensors if isinstance(name, str) and isinstance(lazy, Lazy)}
    if not held:
        raise UserError(f"{path}: holds no tensors by name; a rank's state dict was expected, bare or under 'model'")
    return held


def _made(
    each: Stored, parts: Mapping[str, tuple[int, ...]], weights: Weights, dtype: torch.dtype | None
) -> torch.Tensor:
    return put_together(each, parts, weights).to(dtype)


def _find(path: Path) -> NxdFound:
    found = find_nxd(path)
    if found is None:
        raise UserError(f"{path}: no NxD checkpoint here; wanted model/{_file(0, 0)} or the like")
    return found


def _llama(model: AnyModel) -> LlamaModel:
    if not isinstance(model, LlamaModel):
        raise UserError(f"model.family={model.family}: NxD checkpoints hold Llama models here; use family: llama")
    return model


def _is_tag(path: Path) -> bool:
    model = path / "model"
    return model.is_dir() and any(NOW.fullmatch(file.name) for file in model.iterdir())


def _files_in(folder: Path) -> NxdFound | None:
    files: dict[Rank, Path] = {}
    for path in sorted(folder.iterdir()):  # the first data-parallel rank comes first; others have the same weights
        match = NOW.fullmatch(path.name) or ONCE.fullmatch(path.name)
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
    return NxdFound(folder, {rank: files[rank] for rank in grid}, xser)


def _file(tp: int, pp: int) -> str:
    return f"dp_rank_00_tp_rank_{tp:02d}_pp_rank_{pp:02d}.pt"


@contextmanager
def _writers(paths: list[Path], xser: bool) -> Iterator[list[PickleWriter | XserWriter]]:
    """A file for each path, all finished when the block ends well, all gone when it does not."""
    made: list[PickleWriter | XserWriter] = []
    try:
        for path in paths:
            made.append(XserWriter(path) if xser else PickleWriter(path))
        yield made
        all_together(writer.close for writer in made)
    except BaseException:
        for writer in made:
            writer.abandon()
        raise


@contextmanager
def _new_checkpoint(directory: Path) -> Iterator[Path]:
    """A folder for model files; when the block ends well, it is `directory`/model, marked complete."""
    with whole_directory(new_directory(directory)) as part:
        write_whole(part / "checkpoint", "1")
        folder = part / "model"
        folder.mkdir()
        yield folder
        sync_directory(folder)
        write_whole(part / "done", "1")

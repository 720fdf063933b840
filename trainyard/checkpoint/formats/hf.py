"""Hugging Face directories in and out: config.json and weights, in one file or in shards with an index.

Read are safetensors and the older .bin files; written are safetensors that transformers' from_pretrained reads. Both
stream: a tensor at a time, from mapped memory.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainyard import devices, models
from trainyard.checkpoint.formats.tensor_map import (
    Piece,
    Region,
    Scattered,
    Stored,
    Weights,
    put_together,
    shapes_of,
    slices_of,
    stored_shape,
)
from trainyard.checkpoint.io.async_io import ahead, syncing
from trainyard.checkpoint.io.safetensors_file import header, lazy_tensors, write_tensor
from trainyard.checkpoint.io.torch_file import Lazy, open_pickle
from trainyard.config.hf_config import from_hf as config_from_hf
from trainyard.config.hf_config import to_hf as config_to_hf
from trainyard.core.atomic_files import whole_directory
from trainyard.core.errors import UserError

SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
SHARD = 5 * 10**9
"""Bytes of a file, at most, where a model is written in several (a tensor is never cut)."""
TOKENIZER = re.compile(
    r"(tokenizer.*\.(json|model)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|generation_config\.json|chat_template.*)"
)
"""Files beside the weights that belong to the model whatever its layout."""
BUFFERS = re.compile(r"(rotary_emb\.inv_freq|embeddings\.position_ids|attn\.(masked_)?bias)$")
"""What older versions of transformers saved and no model needs."""


def stored(model: models.AnyModel) -> tuple[Stored, ...]:
    """Every tensor of a Hugging Face model."""
    family = models.family(model)
    layers = family.blueprint(model).layers
    shapes = shapes_of(model)
    out: dict[str, Stored] = {}
    for ours, hf in family.names(model).table.items():
        for number in range(layers if "*" in ours else 1):
            part, name = (text.replace("*", str(number)) for text in (ours, hf.name))
            piece = Piece(part, 0, shapes[part][0])
            before = out[name].pieces if name in out else ()
            out[name] = Stored(name, 0, (*before, piece), transposed=hf.transposed)
    return tuple(out.values())


class InMemory:
    """Whole parameters of ours, by name, as Weights. What is asked for part after part is asked of `values` once."""

    def __init__(self, model: models.AnyModel, values: models.Values, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.values, self._dtype = model, values, dtype
        blueprint = models.family(model).blueprint(model)
        self._owner: dict[str, tuple[str, int]] = {}
        for name in blueprint.names():
            start = 0
            for piece in blueprint.slices(name):
                self._owner[piece.name] = name, start
                start += piece.shape[0]
        self._last: tuple[str, Tensor] | None = None

    def dtype(self, part: str) -> torch.dtype:
        return self._dtype

    def read(self, part: str, region: Region) -> Tensor:
        name, start = self._owner[part]
        if not self._last or self._last[0] != name:
            self._last = name, self.values(name)
        rows = slice(start + region[0].start, start + region[0].stop)
        return self._last[1][(rows, *region[1:])]


def of_tensors(model: models.AnyModel, tensors: Mapping[str, Tensor | Lazy]) -> Weights:
    """Weights from Hugging Face tensors by name, checked for what is missing, unknown or of another shape."""
    wanted, tensors = {each.name: each for each in stored(model)}, _by_todays_names(model, tensors)
    ties = models.family(model).names(model).ties
    missing = [name for name in wanted if name not in tensors]
    extra = [name for name in tensors if name not in wanted and name not in ties and not BUFFERS.search(name)]
    if missing or extra:
        what = f"{missing[0]} is missing" if missing else f"{extra[0]} has no place in this model"
        raise UserError(f"checkpoint does not fit the model: {what} ({len(missing)} missing, {len(extra)} unknown)")
    shapes = shapes_of(model)
    for name, each in wanted.items():
        found, shape = tuple(tensors[name].shape), stored_shape(each, shapes)
        if found != shape:
            raise UserError(f"checkpoint does not fit the model: {name} is {list(found)}, wanted {list(shape)}")

    def read(_: str, name: str, region: Region) -> Tensor:
        tensor = tensors[name]
        return tensor[region] if isinstance(tensor, Tensor) else tensor.read(region)

    held = [("", each) for each in wanted.values()]
    return Scattered(model, held, read, lambda _, name: tensors[name].dtype)


def _by_todays_names(model: models.AnyModel, tensors: Mapping[str, Tensor | Lazy]) -> dict[str, Tensor | Lazy]:
    """The first BERT files call a norm's weight and bias gamma and beta, and GPT-2's have names without a prefix."""
    bare = model.family == "gpt" and "wte.weight" in tensors

    def today(name: str) -> str:
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        return f"transformer.{name}" if bare and not name.startswith("lm_head.") else name

    return {today(name): tensor for name, tensor in tensors.items()}


def to_tensors(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor, one at a time."""
    shapes = shapes_of(weights.model)
    for each in stored(weights.model):
        yield each.name, put_together(each, shapes, weights)


def is_hf(root: Path) -> bool:
    return root.is_dir() and any((root / name).is_file() for name in _names())


def open_hf(directory: str | Path, model: models.AnyModel | None = None) -> Weights:
    """The weights of a directory, of the model that its config.json describes unless another is given."""
    root = Path(directory).expanduser()
    model = model or config_from_hf(root)
    for file, opener in ((SAFETENSORS, lazy_tensors), (BIN, _lazy_bin)):
        if (root / f"{file}.index.json").is_file():
            return of_tensors(model, _sharded(root, f"{file}.index.json", opener))
        if (root / file).is_file():
            return of_tensors(model, opener(root / file))
    raise UserError(f"{root / SAFETENSORS}: no such file; a Hugging Face directory with safetensors was expected")


@dataclass(frozen=True)
class _Planned:
    stored: Stored
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_hf(
    directory: Path,
    weights: Weights,
    dtype: torch.dtype | None = None,
    shard: int = SHARD,
    beside: Path | None = None,
    progress: Callable[[int], None] = lambda count: None,
    write: bool = True,
    beside_writing: bool = True,
) -> None:
    """Write weights that transformers' from_pretrained reads. The directory appears whole or not at all.

    `dtype` None: as they are. `beside`: where tokenizer files are taken from. Where reading brings ranks together, all
    call this, one has `write`, and nothing is read beside writing, in another thread.
    """
    shapes = shapes_of(weights.model)
    plan = [
        _Planned(each, dtype or weights.dtype(each.pieces[0].part), stored_shape(each, shapes))
        for each in stored(weights.model)
    ]
    if not write:
        for each in plan:
            put_together(each.stored, shapes, weights)
        return
    files = _in_files(plan, shard)
    makers = (partial(_made, each, shapes, weights) for tensors in files.values() for each in tensors)
    made = ahead(makers) if beside_writing else (make() for make in makers)
    with whole_directory(directory) as part:
        _write_files(part, files, made, progress)
        if len(files) > 1:
            where = {each.stored.name: name for name, tensors in files.items() for each in tensors}
            _write_json(
                part / f"{SAFETENSORS}.index.json",
                {"metadata": {"total_size": sum(each.bytes for each in plan)}, "weight_map": where},
            )
        write_config(part / "config.json", weights.model, plan[0].dtype)
        if beside:
            copy_tokenizer(beside, part)


def _write_files(
    part: Path, files: Mapping[str, list[_Planned]], made: Iterator[Tensor], progress: Callable[[int], None]
) -> None:
    with syncing() as close:
        for name, tensors in files.items():
            file = (part / name).open("wb")
            file.write(header([(each.stored.name, each.dtype, each.shape) for each in tensors], {"format": "pt"}))
            for _ in tensors:
                progress(write_tensor(file, next(made)))
            close(file)


def _made(each: _Planned, shapes: Mapping[str, tuple[int, ...]], weights: Weights) -> Tensor:
    return put_together(each.stored, shapes, weights).to("cpu", each.dtype)


def write_config(path: Path, model: models.AnyModel, dtype: torch.dtype) -> None:
    _write_json(path, config_to_hf(model, str(dtype).removeprefix("torch.")))


def tokenizer_files(directory: Path) -> list[Path]:
    """Files that belong to a model whatever form its weights have."""
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    return [path for path in paths if TOKENIZER.fullmatch(path.name) and path.is_file()]


def copy_tokenizer(source: Path, directory: Path) -> None:
    for path in tokenizer_files(source):
        shutil.copyfile(path, directory / path.name)


def save_hf(
    directory: Path,
    model: models.AnyModel,
    values: models.Values,
    dtype: torch.dtype = torch.float32,
    write: bool = True,
) -> None:
    """`write_hf` from whole parameters of ours."""
    write_hf(directory, InMemory(model, values, dtype), dtype, write=write, beside_writing=False)


def load_model(directory: str | Path, device: str = "auto") -> tuple[models.AnyModel, nn.Module]:
    """A model ready for use (evaluation mode, fp32), and its configuration, from a Hugging Face directory."""
    weights = open_hf(directory)
    handle = devices.select(device).handle
    values = slices_of(weights)
    model = models.build(weights.model, handle)
    return weights.model, models.fill(model, lambda name: values(name).to(handle)).eval()


def _names() -> list[str]:
    return [name for file in (SAFETENSORS, BIN) for name in (file, f"{file}.index.json")]


def _sharded(root: Path, index: str, opener: Callable[[Path], Mapping[str, Lazy]]) -> dict[str, Lazy]:
    try:
        found = json.loads((root / index).read_text(encoding="utf-8"))["weight_map"]
        where = {name: str(file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{root / index}: not an index of weights") from None
    opened: dict[str, Mapping[str, Lazy]] = {}
    for file in sorted(set(where.values())):
        if Path(file).name != file:
            raise UserError(f"{root / index}: names {file}, which is not beside it")
        opened[file] = opener(root / file)
    for name, file in where.items():
        if name not in opened[file]:
            raise UserError(f"{root / file}: {name} is not in it; {index} says it is")
    return {name: opened[file][name] for name, file in where.items()}


def _lazy_bin(path: Path) -> dict[str, Lazy]:
    found = open_pickle(path)
    if not isinstance(found, dict) or not all(isinstance(x, str) and isinstance(y, Lazy) for x, y in found.items()):
        raise UserError(f"{path}: not a file of weights by name")
    return found


def _in_files(plan: list[_Planned], shard: int) -> dict[str, list[_Planned]]:
    files: list[list[_Planned]] = [[]]
    size = 0
    for each in plan:
        if files[-1] and size + each.bytes > shard:
            files.append([])
            size = 0
        files[-1].append(each)
        size += each.bytes
    if len(files) == 1:
        return {SAFETENSORS: files[0]}
    return {f"model-{number:05d}-of-{len(files):05d}.safetensors": each for number, each in enumerate(files, 1)}


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

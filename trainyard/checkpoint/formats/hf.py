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
    ShardedWeights,
    StoredTensor,
    TensorIndex,
    TensorRange,
    WeightSource,
    assemble,
    stored_shape,
    tp_rank_values,
    unfused_shapes,
)
from trainyard.checkpoint.io.async_io import background_fsync, prefetch
from trainyard.checkpoint.io.safetensors_file import encode_header, open_safetensors, write_tensor
from trainyard.checkpoint.io.torch_file import LazyTensor, open_torch_file
from trainyard.config.hf_config import from_hf as config_from_hf
from trainyard.config.hf_config import to_hf as config_to_hf
from trainyard.core.atomic_files import atomic_directory
from trainyard.core.errors import UserError

SAFETENSORS_FILE, BIN_FILE = "model.safetensors", "pytorch_model.bin"
MAX_SHARD_BYTES = 5 * 10**9
"""Bytes of a file, at most, where a model is written in several (a tensor is never cut)."""
TOKENIZER_FILES = re.compile(
    r"(tokenizer.*\.(json|model)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|generation_config\.json|chat_template.*)"
)
"""Files beside the weights that belong to the model whatever its layout."""
IGNORED_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|embeddings\.position_ids|attn\.(masked_)?bias)$")
"""What older versions of transformers saved and no model needs."""


def stored_tensors(model: models.AnyModelConfig) -> tuple[StoredTensor, ...]:
    """Every tensor of a Hugging Face model."""
    family = models.family_of(model)
    layers = family.blueprint(model).layers
    shapes = unfused_shapes(model)
    out: dict[str, StoredTensor] = {}
    for ours, hf in family.hf_names(model).table.items():
        for number in range(layers if "*" in ours else 1):
            part, name = (text.replace("*", str(number)) for text in (ours, hf.name))
            piece = TensorRange(part, 0, shapes[part][0])
            before = out[name].ranges if name in out else ()
            out[name] = StoredTensor(name, 0, (*before, piece), transposed=hf.transposed)
    return tuple(out.values())


class InMemoryWeights:
    """Whole parameters of ours, by name, as Weights. What is asked for part after part is asked of `values` once."""

    def __init__(
        self, model: models.AnyModelConfig, values: models.ParameterValues, dtype: torch.dtype = torch.float32
    ) -> None:
        self.model, self.values, self._dtype = model, values, dtype
        blueprint = models.family_of(model).blueprint(model)
        self._param_of: dict[str, tuple[str, int]] = {}
        for name in blueprint.parameter_names():
            start = 0
            for piece in blueprint.tp_slices(name):
                self._param_of[piece.name] = name, start
                start += piece.shape[0]
        self._cached: tuple[str, Tensor] | None = None

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def read(self, part: str, region: TensorIndex) -> Tensor:
        name, start = self._param_of[part]
        if not self._cached or self._cached[0] != name:
            self._cached = name, self.values(name)
        rows = slice(start + region[0].start, start + region[0].stop)
        return self._cached[1][(rows, *region[1:])]


def weights_from_tensors(model: models.AnyModelConfig, tensors: Mapping[str, Tensor | LazyTensor]) -> WeightSource:
    """Weights from Hugging Face tensors by name, checked for what is missing, unknown or of another shape."""
    wanted, tensors = {each.name: each for each in stored_tensors(model)}, _modernize_names(model, tensors)
    ties = models.family_of(model).hf_names(model).tied
    missing = [name for name in wanted if name not in tensors]
    extra = [name for name in tensors if name not in wanted and name not in ties and not IGNORED_BUFFERS.search(name)]
    if missing or extra:
        what = f"{missing[0]} is missing" if missing else f"{extra[0]} has no place in this model"
        raise UserError(f"checkpoint does not fit the model: {what} ({len(missing)} missing, {len(extra)} unknown)")
    shapes = unfused_shapes(model)
    for name, each in wanted.items():
        found, shape = tuple(tensors[name].shape), stored_shape(each, shapes)
        if found != shape:
            raise UserError(f"checkpoint does not fit the model: {name} is {list(found)}, wanted {list(shape)}")

    def read(_: str, name: str, region: TensorIndex) -> Tensor:
        tensor = tensors[name]
        return tensor[region] if isinstance(tensor, Tensor) else tensor.read(region)

    held = [("", each) for each in wanted.values()]
    return ShardedWeights(model, held, read, lambda _, name: tensors[name].dtype)


def _modernize_names(
    model: models.AnyModelConfig, tensors: Mapping[str, Tensor | LazyTensor]
) -> dict[str, Tensor | LazyTensor]:
    """The first BERT files call a norm's weight and bias gamma and beta, and GPT-2's have names without a prefix."""
    bare = model.family == "gpt" and "wte.weight" in tensors

    def today(name: str) -> str:
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        return f"transformer.{name}" if bare and not name.startswith("lm_head.") else name

    return {today(name): tensor for name, tensor in tensors.items()}


def hf_tensors(weights: WeightSource) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor, one at a time."""
    shapes = unfused_shapes(weights.model)
    for each in stored_tensors(weights.model):
        yield each.name, assemble(each, shapes, weights)


def is_hf(root: Path) -> bool:
    return root.is_dir() and any((root / name).is_file() for name in _weight_file_names())


def open_hf(directory: str | Path, model: models.AnyModelConfig | None = None) -> WeightSource:
    """The weights of a directory, of the model that its config.json describes unless another is given."""
    root = Path(directory).expanduser()
    model = model or config_from_hf(root)
    for file, opener in ((SAFETENSORS_FILE, open_safetensors), (BIN_FILE, _open_bin)):
        if (root / f"{file}.index.json").is_file():
            return weights_from_tensors(model, _open_sharded(root, f"{file}.index.json", opener))
        if (root / file).is_file():
            return weights_from_tensors(model, opener(root / file))
    raise UserError(f"{root / SAFETENSORS_FILE}: no such file; a Hugging Face directory with safetensors was expected")


@dataclass(frozen=True)
class _PlannedTensor:
    stored: StoredTensor
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_hf(
    directory: Path,
    weights: WeightSource,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer_source: Path | None = None,
    progress: Callable[[int], None] = lambda count: None,
    is_writer: bool = True,
    prefetch_reads: bool = True,
) -> None:
    """Write weights that transformers' from_pretrained reads. The directory appears whole or not at all.

    `dtype` None: as they are. `beside`: where tokenizer files are taken from. Where reading brings ranks together, all
    call this, one has `write`, and nothing is read beside writing, in another thread.
    """
    shapes = unfused_shapes(weights.model)
    plan = [
        _PlannedTensor(each, dtype or weights.dtype(each.ranges[0].name), stored_shape(each, shapes))
        for each in stored_tensors(weights.model)
    ]
    if not is_writer:
        for each in plan:
            assemble(each.stored, shapes, weights)
        return
    files = _group_into_files(plan, max_shard_bytes)
    makers = (partial(_assemble_on_host, each, shapes, weights) for tensors in files.values() for each in tensors)
    made = prefetch(makers) if prefetch_reads else (make() for make in makers)
    with atomic_directory(directory) as part:
        _write_files(part, files, made, progress)
        if len(files) > 1:
            where = {each.stored.name: name for name, tensors in files.items() for each in tensors}
            _write_json(
                part / f"{SAFETENSORS_FILE}.index.json",
                {"metadata": {"total_size": sum(each.nbytes for each in plan)}, "weight_map": where},
            )
        write_config(part / "config.json", weights.model, plan[0].dtype)
        if tokenizer_source:
            copy_tokenizer(tokenizer_source, part)


def _write_files(
    directory: Path,
    files: Mapping[str, list[_PlannedTensor]],
    host_tensors: Iterator[Tensor],
    progress: Callable[[int], None],
) -> None:
    with background_fsync() as close:
        for name, tensors in files.items():
            file = (directory / name).open("wb")
            file.write(
                encode_header([(each.stored.name, each.dtype, each.shape) for each in tensors], {"format": "pt"})
            )
            for _ in tensors:
                progress(write_tensor(file, next(host_tensors)))
            close(file)


def _assemble_on_host(planned: _PlannedTensor, shapes: Mapping[str, tuple[int, ...]], weights: WeightSource) -> Tensor:
    return assemble(planned.stored, shapes, weights).to("cpu", planned.dtype)


def write_config(path: Path, model: models.AnyModelConfig, dtype: torch.dtype) -> None:
    _write_json(path, config_to_hf(model, str(dtype).removeprefix("torch.")))


def tokenizer_files(directory: Path) -> list[Path]:
    """Files that belong to a model whatever form its weights have."""
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    return [path for path in paths if TOKENIZER_FILES.fullmatch(path.name) and path.is_file()]


def copy_tokenizer(source: Path, directory: Path) -> None:
    for path in tokenizer_files(source):
        shutil.copyfile(path, directory / path.name)


def save_hf(
    directory: Path,
    model: models.AnyModelConfig,
    values: models.ParameterValues,
    dtype: torch.dtype = torch.float32,
    is_writer: bool = True,
) -> None:
    """`write_hf` from whole parameters of ours."""
    write_hf(directory, InMemoryWeights(model, values, dtype), dtype, is_writer=is_writer, prefetch_reads=False)


def load_model(directory: str | Path, device: str = "auto") -> tuple[models.AnyModelConfig, nn.Module]:
    """A model ready for use (evaluation mode, fp32), and its configuration, from a Hugging Face directory."""
    weights = open_hf(directory)
    handle = devices.select(device).torch_device
    values = tp_rank_values(weights)
    model = models.build_model(weights.model, handle)
    return weights.model, models.fill_parameters(model, lambda name: values(name).to(handle)).eval()


def _weight_file_names() -> list[str]:
    return [name for file in (SAFETENSORS_FILE, BIN_FILE) for name in (file, f"{file}.index.json")]


def _open_sharded(root: Path, index: str, opener: Callable[[Path], Mapping[str, LazyTensor]]) -> dict[str, LazyTensor]:
    try:
        found = json.loads((root / index).read_text(encoding="utf-8"))["weight_map"]
        where = {name: str(file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{root / index}: not an index of weights") from None
    opened: dict[str, Mapping[str, LazyTensor]] = {}
    for file in sorted(set(where.values())):
        if Path(file).name != file:
            raise UserError(f"{root / index}: names {file}, which is not beside it")
        opened[file] = opener(root / file)
    for name, file in where.items():
        if name not in opened[file]:
            raise UserError(f"{root / file}: {name} is not in it; {index} says it is")
    return {name: opened[file][name] for name, file in where.items()}


def _open_bin(path: Path) -> dict[str, LazyTensor]:
    found = open_torch_file(path)
    if not isinstance(found, dict) or not all(
        isinstance(x, str) and isinstance(y, LazyTensor) for x, y in found.items()
    ):
        raise UserError(f"{path}: not a file of weights by name")
    return found


def _group_into_files(plan: list[_PlannedTensor], max_shard_bytes: int) -> dict[str, list[_PlannedTensor]]:
    files: list[list[_PlannedTensor]] = [[]]
    size = 0
    for each in plan:
        if files[-1] and size + each.nbytes > max_shard_bytes:
            files.append([])
            size = 0
        files[-1].append(each)
        size += each.nbytes
    if len(files) == 1:
        return {SAFETENSORS_FILE: files[0]}
    return {f"model-{number:05d}-of-{len(files):05d}.safetensors": each for number, each in enumerate(files, 1)}


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

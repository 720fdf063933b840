"""Reads and writes Hugging Face directories: config.json and weights, in one file or in shards with an index.

It reads safetensors and the older .bin files, and writes safetensors that transformers' from_pretrained reads. Both
directions stream one tensor at a time from mapped memory.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainyard import devices, models
from trainyard.checkpoint.safetensors_file import TensorSpec, stream_tensors
from trainyard.checkpoint.weights import WeightSource, local_values, unfused_tensors
from trainyard.core.atomic_files import atomic_directory, durable_file
from trainyard.core.errors import UserError, one_line
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.hf_config import from_hf as config_from_hf
from trainyard.families.hf_config import read_hf
from trainyard.families.hf_config import to_hf as config_to_hf
from trainyard.families.model_config import context_notes, first_model_difference
from trainyard.families.mtp import is_later_layer, stored_mtp
from trainyard.families.registry import hf_names
from trainyard.formats.format import CheckpointFormat, FormatWriter
from trainyard.formats.io.async_io import background_fsync, prefetch
from trainyard.formats.io.lazy_tensor import LazyTensor
from trainyard.formats.io.safetensors_reader import CheckedTensor, open_safetensors
from trainyard.formats.io.torch_file import named_tensors, open_torch_file
from trainyard.formats.tensor_map import ShardedWeights, StoredTensor, assemble, check_all_stored, check_tensors
from trainyard.models.sharding import fused_index, fused_starts
from trainyard.remote.model_files import MODEL_FILES

SAFETENSORS_FILE, BIN_FILE = "model.safetensors", "pytorch_model.bin"
MAX_SHARD_BYTES = 5 * 10**9
"""Maximum size of a weight file. Larger models are written to several files; a tensor is never split."""
ModelFiles = Mapping[str, bytes]
"""Contents of the tokenizer's files, and of others that belong to a model, by name."""
CHECKSUM_FILE = "trainyard.sha256"
"""SHA-256 of the files that are exported with the weights, as sha256sum writes and checks them. The weights have
checksums in their own headers, so that they do not change if only a tokenizer does."""
CHECKSUM_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\n]+)")
IGNORED_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|embeddings\.position_ids|attn\.(masked_)?bias)$")
"""Buffers that older versions of transformers saved and no model needs."""


def stored_tensors(model: models.ModelConfig) -> tuple[StoredTensor, ...]:
    """Every tensor of a Hugging Face model."""
    family = models.family_of(model)
    layers = family.blueprint(model).layers
    tensors = unfused_tensors(model)
    out: dict[str, StoredTensor] = {}
    for unfused_pattern, hf in hf_names(model).table.items():
        for layer in range(layers if "*" in unfused_pattern else 1):
            unfused_name, name = (text.replace("*", str(layer)) for text in (unfused_pattern, hf.name))
            if unfused_name not in tensors:  # a row of the blueprint for other layers
                continue
            slices = out[name].slices if name in out else ()
            how = {field: getattr(hf, field) for field in ("transposed", "stacked", "interleaved", "groups")}
            out[name] = StoredTensor(name, 0, (*slices, tensors[unfused_name]), **how)
    out |= {copy: replace(out[name], name=copy) for copy, name in hf_names(model).copies.items()}
    check_all_stored(model, out.values(), "its Hugging Face names")
    return tuple(out.values())


class InMemoryWeights:
    """Full (fused) parameters as a WeightSource. Reading the slices of a parameter one after the other calls `values`
    once."""

    def __init__(
        self, model: models.ModelConfig, values: models.ParameterValues, dtype: torch.dtype = torch.float32
    ) -> None:
        self.model, self.values, self._dtype = model, values, dtype
        blueprint = models.blueprint_of(model)
        self._param_of = {
            unfused_name: (param, start)
            for param in blueprint.parameter_names()
            for unfused_name, start in fused_starts(blueprint, param).items()
        }
        self._cached: tuple[str, Tensor] | None = None

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def read(self, piece: TensorSlice) -> Tensor:
        param, start = self._param_of[piece.name]
        if not self._cached or self._cached[0] != param:
            self._cached = param, self.values(param)
        return self._cached[1][fused_index(piece, start)]


def weights_from_tensors(model: models.ModelConfig, tensors: Mapping[str, LazyTensor]) -> ShardedWeights:
    """Weights from Hugging Face tensors by name, after a check for missing, unknown and misshapen tensors."""
    hf = models.family_of(model).hf
    names = tensors.keys()
    tensors = {hf.current_name(name, names): tensor for name, tensor in tensors.items()}
    model = stored_mtp(model, tensors)
    repeated = hf_names(model).tied | hf_names(model).copies
    expected = {stored.name: stored for stored in stored_tensors(model) if stored.name not in repeated}

    def is_ignored(name: str) -> bool:
        is_unread = IGNORED_BUFFERS.search(name) or re.match(hf.unread, name)
        return name in repeated or bool(is_unread) or is_later_layer(model, name)

    check_tensors("checkpoint", expected, tensors, is_ignored)
    return ShardedWeights(model, ((stored, tensors[name]) for name, stored in expected.items()))


def hf_tensors(weights: WeightSource) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor, one at a time."""
    for stored in stored_tensors(weights.model):
        yield stored.name, assemble(stored, weights)


def is_hf(root: Path) -> bool:
    names = (f"{file}{suffix}" for file in (SAFETENSORS_FILE, BIN_FILE) for suffix in ("", ".index.json"))
    return any((root / name).is_file() for name in names)


def open_hf(directory: str | Path, model: models.ModelConfig | None = None) -> ShardedWeights:
    """Open the weights of a directory. The model is `model` if given, else the one in config.json."""
    root = Path(directory).expanduser()
    model = model or config_from_hf(root)
    for file, opener in ((SAFETENSORS_FILE, open_safetensors), (BIN_FILE, _open_bin)):
        if (root / f"{file}.index.json").is_file():
            weights = weights_from_tensors(model, _open_sharded(root, f"{file}.index.json", opener))
        elif (root / file).is_file():
            weights = weights_from_tensors(model, opener(root / file))
        else:
            continue
        weights.notes = (*changed_files(root), *_context_notes(root / "config.json", model))
        return weights
    raise UserError(f"{root / SAFETENSORS_FILE}: no such file; expected a Hugging Face directory with safetensors")


def _context_notes(file: Path, model: models.ModelConfig) -> tuple[str, ...]:
    """What differs between the positions of a model and those of the config.json beside its weights."""
    try:
        return context_notes(read_hf(json.loads(file.read_text()), models.family_of(model)), model)
    except (OSError, ValueError, UserError):  # the model is what the caller says
        return ()


def write_hf(
    directory: Path,
    weights: WeightSource,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    model_files: ModelFiles | None = None,
    progress: Callable[[int], None] = lambda count: None,
    is_writer: bool = True,
    prefetch_reads: bool = True,
) -> None:
    """Write a directory that transformers' from_pretrained reads. It appears under its name only when complete.

    `dtype` None keeps the dtypes of `weights`. `model_files` are those of the tokenizer and others to add. If reading
    weights is a collective operation, all ranks call this, one of them with `is_writer`, and without
    `prefetch_reads`, which reads ahead in another thread.
    """
    tensors = stored_tensors(weights.model)
    if not is_writer:
        for piece in (piece for stored in tensors for piece in stored.slices):
            weights.read(piece)
        return
    dtypes = [dtype or weights.dtype(stored.slices[0].name) for stored in tensors]
    specs = [TensorSpec(stored.name, kind, stored.shape) for stored, kind in zip(tensors, dtypes, strict=True)]
    files = _group_into_files(specs, max_shard_bytes)
    producers = (partial(assemble, stored, weights, kind) for stored, kind in zip(tensors, dtypes, strict=True))
    host_tensors = prefetch(producers) if prefetch_reads else (produce() for produce in producers)
    other_files = dict(model_files or {})
    if len(files) > 1:
        file_of = {spec.name: name for name, specs_in_file in files.items() for spec in specs_in_file}
        index = {"metadata": {"total_size": sum(spec.nbytes for spec in specs)}, "weight_map": file_of}
        other_files[f"{SAFETENSORS_FILE}.index.json"] = _json_bytes(index)

    def count_bytes(tensor: Tensor) -> Tensor:
        progress(tensor.nbytes)
        return tensor

    with atomic_directory(directory) as temporary:
        write_model_files(temporary, weights.model, dtypes[0], other_files, with_checksums=True)
        with background_fsync() as close:
            for name, specs_in_file in files.items():
                file = (temporary / name).open("wb")
                in_file = map(count_bytes, islice(host_tensors, len(specs_in_file)))
                stream_tensors(file, specs_in_file, in_file)
                close(file)


def write_model_files(
    directory: Path,
    model: models.ModelConfig,
    dtype: torch.dtype,
    model_files: ModelFiles | None = None,
    with_checksums: bool = False,
) -> None:
    """Write config.json and `model_files`; with CHECKSUM_FILE, if the format allows other files than its own."""
    config = config_to_hf(model, str(dtype).removeprefix("torch."))
    files = {**(model_files or {}), "config.json": _json_bytes(config)}
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items())]
    if with_checksums:
        files[CHECKSUM_FILE] = "".join(lines).encode()
    for name, data in files.items():
        with durable_file(directory / name) as file:
            file.write(data)


def verify_export(directory: Path) -> bool:
    """Compare all files of an exported model with their checksums. Returns False if there are none, as in a directory
    that others wrote; then only the headers of the weights are checked."""
    has_checksums = (directory / CHECKSUM_FILE).is_file()
    for problem in changed_files(directory):
        raise UserError(f"{problem}; if you edited it, remove its line there")
    for path in sorted(directory.glob("*.safetensors")):
        for tensor in open_safetensors(path).values():
            has_checksums = has_checksums or isinstance(tensor, CheckedTensor)
            tensor.read()
    return has_checksums


def changed_files(directory: Path) -> Iterator[str]:
    """A line for each file that CHECKSUM_FILE names and that is not as it was exported."""
    path = directory / CHECKSUM_FILE
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.splitlines():
        match = CHECKSUM_LINE.fullmatch(line)
        if not match:
            yield f"{path}: has a line that sha256sum did not write: {line[:80]!r}"
            continue
        file = directory / match[2]
        if not file.is_file():
            yield f"{file}: missing, although {CHECKSUM_FILE} names it"
        elif hashlib.sha256(file.read_bytes()).hexdigest() != match[1]:
            yield f"{file}: its checksum differs from the one in {CHECKSUM_FILE}"


def read_model_files(directory: Path) -> dict[str, bytes]:
    """The tokenizer files of a directory, and other files that belong to a model whatever the format of its weights."""
    try:
        return {path.name: path.read_bytes() for path in tokenizer_files(directory)}
    except OSError as error:
        raise UserError(f"{directory}: cannot be read: {one_line(error)}") from None


def tokenizer_files(directory: Path) -> list[Path]:
    """The paths of the files that read_model_files reads."""
    paths = sorted(directory.iterdir()) if directory.is_dir() else []
    return [path for path in paths if MODEL_FILES.fullmatch(path.name) and path.is_file()]


def save_hf(
    directory: Path,
    model: models.ModelConfig,
    values: models.ParameterValues,
    dtype: torch.dtype = torch.float32,
    is_writer: bool = True,
    model_files: ModelFiles | None = None,
) -> None:
    """Call `write_hf` with full parameters."""
    weights = InMemoryWeights(model, values, dtype)
    write_hf(directory, weights, dtype, model_files=model_files, is_writer=is_writer, prefetch_reads=False)


def load_model(directory: str | Path, device: str = "auto") -> tuple[models.ModelConfig, nn.Module]:
    """Load a Hugging Face directory. Returns the configuration and the model in evaluation mode and fp32."""
    weights = open_hf(directory)
    handle = devices.select(device).torch_device
    values = local_values(weights)
    model = models.build_model(weights.model, handle)
    return weights.model, models.fill_parameters(model, lambda name: values(name).to(handle)).eval()


def _open_sharded(root: Path, index: str, opener: Callable[[Path], Mapping[str, LazyTensor]]) -> dict[str, LazyTensor]:
    try:
        weight_map = json.loads((root / index).read_text(encoding="utf-8"))["weight_map"]
        file_of = {name: str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{root / index}: not an index of weights") from None
    opened: dict[str, Mapping[str, LazyTensor]] = {}
    for file in sorted(set(file_of.values())):
        if Path(file).name != file:
            raise UserError(f"{root / index}: names {file}, which is not a file in the same directory")
        opened[file] = opener(root / file)
    for name, file in file_of.items():
        if name not in opened[file]:
            raise UserError(f"{root / file}: does not hold {name}, although {index} says so")
    return {name: opened[file][name] for name, file in file_of.items()}


def _open_bin(path: Path) -> dict[str, LazyTensor]:
    state = open_torch_file(path)
    tensors = named_tensors(state)
    if not isinstance(state, dict) or len(tensors) != len(state):
        raise UserError(f"{path}: not a dict of tensors by name")
    return tensors


def _group_into_files(specs: list[TensorSpec], max_shard_bytes: int) -> dict[str, list[TensorSpec]]:
    files: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if files[-1] and size + spec.nbytes > max_shard_bytes:
            files.append([])
            size = 0
        files[-1].append(spec)
        size += spec.nbytes
    if len(files) == 1:
        return {SAFETENSORS_FILE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": group for i, group in enumerate(files, 1)}


def _json_bytes(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()


def check_hf_export(model: models.ModelConfig) -> tuple[StoredTensor, ...]:
    """Every tensor of an exported model. Raises UserError if a Hugging Face directory cannot hold the model: a tensor
    has no name there, or its config.json does not read back as the same model."""
    if model.without_router_bias is not model:
        raise UserError("Hugging Face's format has no place for model.router_bias")
    tensors = stored_tensors(model)
    read = read_hf(json.loads(json.dumps(config_to_hf(model))), models.family_of(model))
    if difference := first_model_difference(model, read.model_copy(update={"family": model.family})):
        key, value, found = difference
        raise UserError(f"its config.json would give model.{key}={found} instead of {value}")
    return tensors


FORMAT = CheckpointFormat(
    "hf",
    "a Hugging Face directory",
    is_hf,
    lambda path, model, hints: open_hf(path, model),
    writer=FormatWriter(
        lambda model, layout: check_hf_export(model),
        lambda directory, weights, options: write_hf(
            directory, weights, options.dtype, model_files=options.model_files, progress=options.progress
        ),
        layout_keys={},
    ),
)

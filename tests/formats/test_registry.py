"""The table of formats: a format is one object, from which reading, writing and the command line follow."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.formats.test_nxd import RandomWeights, llama
from trainyard.checkpoint.weights import WeightSource
from trainyard.core.errors import UserError
from trainyard.formats import convert, registry
from trainyard.formats.compare import first_difference
from trainyard.formats.convert import ConversionTarget, convert_checkpoint, parse_layout, total_bytes
from trainyard.formats.format import CheckpointFormat, FormatWriter, WriteOptions
from trainyard.formats.hf import stored_tensors, weights_from_tensors, write_hf
from trainyard.formats.io.lazy_tensor import InlineTensor
from trainyard.formats.native_writer import weights_only_state
from trainyard.formats.nxd.conversion import LAYOUT_KEYS
from trainyard.formats.registry import FORMATS, detect_format, open_weights
from trainyard.formats.tensor_map import ShardedWeights, assemble
from trainyard.models import ModelConfig

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "checkpoints.md"


def open_npz(path: Path, model: ModelConfig) -> ShardedWeights:
    arrays = np.load(path / "weights.npz")
    return weights_from_tensors(model, {name: InlineTensor(torch.from_numpy(arrays[name])) for name in arrays})


def write_npz(directory: Path, weights: WeightSource, options: WriteOptions) -> None:
    directory.mkdir()
    tensors = {stored.name: assemble(stored, weights, options.dtype) for stored in stored_tensors(weights.model)}
    np.savez(directory / "weights.npz", allow_pickle=False, **{name: each.numpy() for name, each in tensors.items()})
    options.progress(sum(tensor.nbytes for tensor in tensors.values()))
    options.write_extra_files(directory)


NPZ = CheckpointFormat(
    "npz",
    "NumPy arrays",
    lambda path: (path / "weights.npz").is_file(),
    lambda path, model, hints: open_npz(path, model),
    stores_model=False,
    writer=FormatWriter(lambda model, layout: stored_tensors(model), write_npz, {"shards": int}, "shards=2"),
)


def test_a_format_is_one_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FORMATS", (*FORMATS, NPZ))
    monkeypatch.setitem(convert.WRITERS, "npz", NPZ.writer)
    write_hf(tmp_path / "hf", RandomWeights(llama()))
    source, written = open_weights(tmp_path / "hf"), list[int]()
    assert parse_layout("npz", "shards=2") == {"shards": 2}
    with pytest.raises(UserError, match="tp=2: npz takes shards, such as shards=2"):
        parse_layout("npz", "tp=2")
    target = ConversionTarget("npz", {})
    convert_checkpoint(source, tmp_path / "hf", tmp_path / "npz", target, written.append)
    assert sum(written) == total_bytes(source, target)
    assert detect_format(tmp_path / "npz") == "npz"
    opened = open_weights(tmp_path / "npz")  # its model is that of the config.json next to the weights
    assert opened.format == "npz"
    assert first_difference(weights_only_state(source.weights), weights_only_state(opened.weights), None) is None


def test_the_table_agrees_with_itself_and_with_the_guide() -> None:
    names = [each.name for each in FORMATS]
    assert len(set(names)) == len(names)
    numbers = {"tp", "pp", "vpp", "ep", "kv_multiplier", "vocab"}
    assert {key for key, kind in LAYOUT_KEYS.items() if kind is int} == numbers  # the others are named there
    for name in convert.WRITERS:
        assert f"`--to {name}`" in GUIDE.read_text()

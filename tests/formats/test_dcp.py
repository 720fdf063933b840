"""torch.distributed.checkpoint: its own files are read bit for bit, and it loads ours. The references are torch itself,
a state dict that torchtitan saved and converted, and checkpoints and logits of Megatron Core (golden/)."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tests.formats.test_nxd import GQA, RandomWeights, assert_same, llama
from tests.support.hf_reference import hf_reference
from trainyard import models
from trainyard.checkpoint.weights import local_values, unfused_tensors
from trainyard.core.errors import UserError
from trainyard.families.hf_config import from_hf
from trainyard.formats.dcp.metadata import read_dcp_tensors
from trainyard.formats.dcp.weights import DcpNames, find_dcp, open_dcp, write_dcp
from trainyard.formats.hf import hf_tensors, write_model_files
from trainyard.formats.registry import open_weights

GOLDEN = Path(__file__).parent / "golden"
TORCHTITAN_MODEL = llama(hidden=16, heads=4, kv_heads=2, layers=2, ffn=24, vocab=64)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class ChunkedTensor(torch.Tensor):
    """A tensor that dcp.save writes in chunks, through the protocol that Megatron Core uses."""

    @staticmethod
    def __new__(cls, tensor: Tensor, *_: Any) -> "ChunkedTensor":
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape)

    def __init__(self, tensor: Tensor, *sizes: int) -> None:
        self.full, self.chunks = tensor, {}
        starts = [range(0, full, size) for full, size in zip(tensor.shape, sizes, strict=True)]
        for offset in torch.cartesian_prod(*(torch.tensor(start) for start in starts)).view(-1, len(sizes)).tolist():
            index = tuple(slice(start, start + size) for start, size in zip(offset, sizes, strict=True))
            self.chunks[torch.Size(offset)] = tensor[index].contiguous()

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, chunk.shape) for offset, chunk in self.chunks.items()]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.full)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.full.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.chunks[index.offset]

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def save(state: dict[str, Any], directory: Path) -> Path:
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    return directory


def load(template: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """What dcp.load reads into a state dict like `template`."""
    state = {name: torch.full_like(tensor, 7) for name, tensor in template.items()}
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert set(a) == set(b)
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor, b[name]), name


# Tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_tensors_saved_by_torch_are_read_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "whole": torch.randn(5, 3),
        "grid": torch.randn(7, 6, 4),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }
    state: dict[str, Any] = {name: (tensor * 9).to(dtype) for name, tensor in tensors.items()}
    found = read_dcp_tensors(
        save({**state, "grid": ChunkedTensor(state["grid"], 3, 2, 4), "nested": {"x": 3}}, tmp_path / "a")
    )
    assert_equal({name: found[name].read() for name in state}, state)
    index = (slice(2, 7), slice(1, 5), slice(0, 3))
    assert torch.equal(found["grid"].read(index).view(torch.uint8), state["grid"][index].contiguous().view(torch.uint8))


def test_the_latest_step_of_a_torchtitan_run_is_found(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save({"x": torch.ones(1)}, tmp_path / "outputs" / "checkpoint" / f"step-{step}")
    (tmp_path / "outputs" / "checkpoint" / "step-100" / ".metadata").unlink()  # killed while saving
    for path in (tmp_path / "outputs", tmp_path / "outputs" / "checkpoint"):
        assert find_dcp(path) == tmp_path / "outputs" / "checkpoint" / "step-10"
    assert find_dcp(tmp_path) is None


# Hugging Face names


@pytest.mark.parametrize("variant", ["llama-gqa", "llama-tied", "gpt2", "bert"])
def test_state_dicts_of_transformers_go_in_and_out(variant: str, tmp_path: Path) -> None:
    """transformers' state dicts have tied tensors twice; dcp.load asks for both."""
    _, reference, config = hf_reference(variant)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = from_hf(tmp_path)
    state = {name: tensor for name, tensor in reference.state_dict().items() if tensor.is_floating_point()}
    for number, content in enumerate((state, {"model": state, "optim": {"exp_avg": torch.ones(3)}})):
        weights = open_dcp(save(content, tmp_path / f"in{number}"), model)
        assert weights.notes == ((), ("not read: 1 tensor of optim",))[number]
        assert all(torch.equal(tensor, state[name]) for name, tensor in hf_tensors(weights))
    write_dcp(tmp_path / "out", weights, max_file_bytes=10_000)
    assert len(list((tmp_path / "out").glob("*.distcp"))) > 1
    assert_equal(load(state, tmp_path / "out"), state)


def test_dtype_and_model_files(tmp_path: Path) -> None:
    weights = RandomWeights(llama(**GQA))
    write_dcp(tmp_path / "a", weights, dtype=torch.bfloat16, write_extra_files=lambda path: _add_config(path, weights))
    opened = open_weights(tmp_path / "a")
    assert opened.format == "dcp"
    assert_same(opened.weights, RandomWeights(llama(**GQA), torch.bfloat16))


def _add_config(path: Path, weights: RandomWeights) -> None:
    write_model_files(path, weights.model, torch.bfloat16)


# torchtitan


def test_torchtitans_own_conversion_gives_the_same_weights() -> None:
    opened = open_dcp(GOLDEN / "torchtitan", TORCHTITAN_MODEL)
    assert_equal(dict(hf_tensors(opened)), load_file(GOLDEN / "torchtitan" / "hf.safetensors"))
    assert opened.notes[1:] == ("not read: 2 tensors of optimizer", "not read: 1 tensor of train_state")
    name = "layers.0.attention.q.weight"
    full = unfused_tensors(TORCHTITAN_MODEL)[name]
    assert torch.equal(opened.read(full.narrow(0, 3, 9).narrow(1, 2, 5)), opened.read(full)[3:9, 2:5])


def torchtitan_state(names: DcpNames) -> dict[str, Tensor]:
    found = read_dcp_tensors(GOLDEN / "torchtitan" / "step-10")
    state = {
        name: tensor.read() for name, tensor in found.items() if not name.startswith(("optimizer.", "train_state."))
    }
    if names == "torchtitan":
        return state
    old_names = {name: name.replace("qkv_linear.", "").replace("lm_head", "output") for name in state}
    return {old_names[name]: tensor for name, tensor in state.items()}


@pytest.mark.parametrize("names", ["torchtitan", "torchtitan-0.2"])
@pytest.mark.parametrize("prefix", ["", "model"])
def test_torchtitans_names_of_both_versions_go_in_and_out(names: DcpNames, prefix: str, tmp_path: Path) -> None:
    state = torchtitan_state(names)
    source = save({prefix: state} if prefix else state, tmp_path / "in")
    weights = open_dcp(source, TORCHTITAN_MODEL)
    assert_equal(dict(hf_tensors(weights)), load_file(GOLDEN / "torchtitan" / "hf.safetensors"))
    write_dcp(tmp_path / "out", weights, names)
    assert_equal(load(state, tmp_path / "out"), state)


def test_tied_embeddings_of_torchtitan(tmp_path: Path) -> None:
    tied = TORCHTITAN_MODEL.model_copy(update={"tie_embeddings": True})
    state = torchtitan_state("torchtitan")
    with pytest.raises(UserError, match=r"tok_embeddings\.weight and lm_head\.weight differ, but the model ties them"):
        open_dcp(save(state, tmp_path / "untied"), tied)
    state["lm_head.weight"] = state["tok_embeddings.weight"]
    write_dcp(tmp_path / "out", open_dcp(save(state, tmp_path / "tied"), tied), "torchtitan")
    assert_equal(load(state, tmp_path / "out"), state)
    del state["lm_head.weight"]
    open_dcp(save(state, tmp_path / "once"), tied)


# Megatron Core


@pytest.mark.parametrize("name", ["llama", "llama-by-layer", "gpt"])
@pytest.mark.parametrize("root", [False, True])
def test_logits_equal_those_of_megatron_core(name: str, root: bool, tmp_path: Path) -> None:
    """The checkpoint and the logits are Megatron's own; it was saved by two tensor-parallel ranks."""
    path = shutil.copytree(GOLDEN / "megatron" / name, tmp_path / name)
    (path / "latest_checkpointed_iteration.txt").write_text("5")
    opened = open_weights(path if root else path / "iter_0000005")
    assert opened.format == "megatron"
    reference = load_file(path / "logits.safetensors")
    model = models.fill_parameters(models.build_model(opened.weights.model), local_values(opened.weights)).eval()
    batch = {
        "tokens": reference["tokens"].int(),
        "rng_key": torch.zeros(2, dtype=torch.int32),
        "sample_ids": torch.zeros(1, dtype=torch.int32),
    }
    with torch.no_grad():
        logits = model(batch).logits().view_as(reference["logits"])
    torch.testing.assert_close(logits, reference["logits"], atol=1e-5, rtol=0)


def test_unknown_tensors_of_megatron_are_refused(tmp_path: Path) -> None:
    source = GOLDEN / "megatron" / "llama" / "iter_0000005"
    state: dict[str, Any] = {name: tensor.read() for name, tensor in read_dcp_tensors(source).items()}
    expert = {"decoder.layers.mlp.experts.linear_fc1.weight": torch.ones(2, 4, 4)}
    optimizer = {"optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight": torch.ones(2, 4)}
    for extra in (optimizer, expert):
        shutil.copy(source / "common.pt", save({**state, **extra}, tmp_path / str(len(extra)) / next(iter(extra))))
    open_weights(tmp_path / "1" / next(iter(optimizer)))
    with pytest.raises(
        UserError, match=r"layers\.0\.mlp\.experts\.dense_h_to_4h\.weight is not a tensor of this model"
    ):
        open_weights(tmp_path / "1" / next(iter(expert)))


# Refusals


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch attacked",)


@pytest.mark.parametrize(
    "content",
    [Attack(), [Attack()], {"state_dict_metadata": Attack()}, 3, None, {"a": torch.ones(2)}],
    ids=["object", "in a list", "in a dict", "number", "nothing", "tensor"],
)
def test_a_metadata_file_never_executes(content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save({"x": torch.ones(2)}, tmp_path / "a")
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=r"\.metadata: corrupt, or not of torch\.distributed\.checkpoint") as error:
        read_dcp_tensors(tmp_path / "a")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "attacked").exists()


def change_metadata(directory: Path, change: Callable[[Any], Any]) -> None:
    """Edit the metadata of a trusted checkpoint of this test."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def set_info(**changes: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            vars(info).update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_info(relative_path="../a/__0_0.distcp"), "not the name of a file in the same directory"),
        (set_info(relative_path="/etc/passwd"), "not the name of a file in the same directory"),
        (set_info(relative_path="gone.distcp"), "gone.distcp: .*No such file"),
        (set_info(transform_descriptors=["zstd"]), "compressed or transformed"),
        (set_info(offset=1), "corrupt, or not a file of torch.save"),
        (set_info(length=20), "corrupt, or not a file of torch.save"),
        (set_info(offset=-1), "invalid shape"),
        (set_info(offset=2**40), "corrupt, or not a file of torch.save"),
        (lambda metadata: metadata.storage_data.clear(), "corrupt"),
        (lambda metadata: metadata.state_dict_metadata["x"].chunks.clear(), "x has 0 of 24 elements"),
        (lambda metadata: setattr(metadata.state_dict_metadata["x"], "size", torch.Size([4, 7])), "24 of 28 elements"),
        (lambda metadata: setattr(metadata.state_dict_metadata["x"], "size", torch.Size([4, 5])), "a chunk exceeds x"),
        (
            lambda metadata: setattr(metadata.state_dict_metadata["x"].properties, "dtype", torch.int32),
            r"x at byte \d+ is not \[4, 6\] of torch.int32",
        ),
    ],
)
def test_damaged_metadata_is_refused_in_one_line(change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    change_metadata(save({"x": torch.randn(4, 6)}, tmp_path / "a"), change)

    def read() -> None:
        tensor = read_dcp_tensors(tmp_path / "a")["x"]
        tensor.check_complete()
        tensor.read()

    with pytest.raises(UserError, match=message) as error:
        read()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("columns", [6, 3])
def test_chunks_that_overlap_are_refused(columns: int, tmp_path: Path) -> None:
    def move_chunk(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["x"].chunks
        index = MetadataIndex("x", [2, 0])
        metadata.storage_data[MetadataIndex("x", [1, 0])] = metadata.storage_data.pop(index)
        next(chunk for chunk in chunks if chunk.offsets == (2, 0)).offsets = torch.Size([1, 0])

    change_metadata(save({"x": ChunkedTensor(torch.randn(4, 6), 2, columns)}, tmp_path / "a"), move_chunk)
    with pytest.raises(UserError, match="the chunks of x overlap or leave gaps"):
        read_dcp_tensors(tmp_path / "a")["x"].read()


def test_other_names_are_refused_with_what_was_found(tmp_path: Path) -> None:
    save({"blocks.0.w": torch.ones(2)}, tmp_path / "a")
    message = r"no tensor is called model\.embed_tokens\.weight or tok_embeddings\.weight; it has blocks\.0\.w, \.\.\."
    with pytest.raises(UserError, match=message):
        open_dcp(tmp_path / "a", llama())
    state = torchtitan_state("torchtitan")
    state["layers.0.attention.q_norm.weight"] = torch.ones(4)
    with pytest.raises(UserError, match=r"layers\.0\.attention\.q_norm\.weight is not a tensor of this model"):
        open_dcp(save(state, tmp_path / "b"), TORCHTITAN_MODEL)
    with pytest.raises(UserError, match="does not store the model's configuration; pass --config"):
        open_weights(tmp_path / "b")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    save({"x": torch.randn(64, 64), "y": torch.randn(64, 64)}, tmp_path / "a")
    path = tmp_path / "a" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(UserError, match=r"__0_0\.distcp: corrupt, or not a file of torch\.save"):
        [tensor.read() for tensor in read_dcp_tensors(tmp_path / "a").values()]

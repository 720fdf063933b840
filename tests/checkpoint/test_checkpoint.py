"""Any slice of any tensor is read from the files that hold it, and torch reads the files too."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from tests.support import configs
from tests.support.examples import examples
from trainyard import Trainer, models
from trainyard.checkpoint import checkpoint as native_checkpoint
from trainyard.checkpoint.checkpoint import Checkpoint, tensor_key
from trainyard.checkpoint.partition import owned_slices
from trainyard.checkpoint.shard_file import CorruptCheckpoint, write_shard
from trainyard.checkpoint.weights import unfused_tensors
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorSlice
from trainyard.parallel.layout import Layout
from trainyard.remote.storage import LocalStorage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # no_dist asks for that
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "tp2-dp2": (4, {"tp": 2}),
    "tp4": (4, {"tp": 4}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "dp3": (3, {}),
    "pp2-vpp2-cp2": (4, {"pp": 2, "vpp": 2, "cp": 2}),
}
CASES = [("llama", name) for name in LAYOUTS] + [("gpt", "tp2-dp2"), ("bert", "tp2-pp2")]
FullTensors = dict[str, dict[str, Tensor]]


def configure(family: str, name: str) -> Config:
    model = {**configs.TINY_MODELS[family], "layers": 4}
    return configs.tiny_config(model, layout=LAYOUTS[name][1], train={"global_batch": 12, "micro_batch": 1})


def write(directory: Path, config: Config, ranks: int) -> FullTensors:
    """Write the files that `ranks` ranks would write, of random values. Returns the full tensors by kind and name."""
    blueprint = models.family_of(config.model).blueprint(config.model)
    layout = Layout.from_config(config, ranks)
    dtypes = {"weights": torch.float32, "first": torch.bfloat16, "second": torch.float32}
    full = {
        kind: {name: torch.randn(tensor.sizes).to(dtype) for name, tensor in unfused_tensors(config.model).items()}
        for kind, dtype in dtypes.items()
    }
    storage = LocalStorage(directory)
    storage.mkdir()
    for rank in range(ranks):
        slices = owned_slices(blueprint, layout, rank)
        tensors = [
            (tensor_key(kind, piece.name), piece.offsets, full[kind][piece.name][piece.to_index()].contiguous())
            for kind in dtypes
            for piece in slices
        ]
        rng_state = torch.arange(5, dtype=torch.uint8)
        write_shard(
            storage,
            native_checkpoint.shard_name(rank),
            [*tensors, (f"random.host.{rank}", [0], rng_state)],
            {"RANDOM": str(rank)},
        )
    kinds = {"weights": "F32", "first": "BF16", "second": "F32"}
    manifest = {"step": 7, "kinds": kinds, "config": config.model_dump(mode="json")}
    native_checkpoint.commit(storage, native_checkpoint.build_shard_table(blueprint, layout), manifest)
    return full


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FullTensors]:
    family, name = request.param
    directory = tmp_path_factory.mktemp("saved") / "step_00000007"
    torch.manual_seed(1)
    return directory, write(directory, configure(family, name), LAYOUTS[name][0])


def read_by_torch(directory: Path, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    state = {key: torch.zeros_like(tensor) for key, tensor in wanted.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(directory)), no_dist=True)
    return state


def test_torch_reads_every_layout(saved: tuple[Path, FullTensors]) -> None:
    directory, full = saved
    wanted = {tensor_key(kind, name): tensor for kind, tensors in full.items() for name, tensor in tensors.items()}
    found = read_by_torch(directory, wanted)
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key


def test_torch_reads_what_a_run_saved(tmp_path: Path) -> None:
    config = configs.tiny_config(train={"steps": 2}, checkpoint={"every": 2}, log={"directory": str(tmp_path)})
    trainer = Trainer(config)
    trainer.run()
    directory = tmp_path / "run" / "checkpoints" / "step_00000002"
    blueprint = trainer.blueprint
    buffers = {
        "weights": trainer.optimizer.state.master_weights,
        "first": trainer.optimizer.state.exp_avg,
        "second": trainer.optimizer.state.exp_avg_sq,
    }
    wanted = {}
    for kind, buffer in buffers.items():
        for name in blueprint.parameter_names():
            begin = 0
            for piece in blueprint.local_slices(name):
                end = begin + piece.sizes[0]
                wanted[tensor_key(kind, piece.name)] = trainer.optimizer.state.shard_view(buffer, name)[begin:end]
                begin = end
    found = read_by_torch(directory, wanted)
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    with safe_open(str(directory / "rank_00000.safetensors"), framework="pt") as file:
        assert set(file.keys()) == {*wanted, "random.host.0"}


def bytes_from_files() -> int:
    """Bytes that this process has read so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def test_any_slice_is_read_without_a_byte_more(saved: tuple[Path, FullTensors]) -> None:
    directory, full = saved
    with Checkpoint(LocalStorage(directory)) as checkpoint:
        checkpoint.verify(checkpoint.files)
        start = bytes_from_files()
        overhead = bytes_from_files() - start  # of reading the counter

        @examples(100, database=None)
        @given(st.data())
        def check(data: Any) -> None:
            kind = data.draw(st.sampled_from(native_checkpoint.STATE_KINDS))
            name = data.draw(st.sampled_from(sorted(full[kind])))
            tensor = full[kind][name]
            offsets = tuple(data.draw(st.integers(0, size - 1)) for size in tensor.shape)
            sizes = tuple(data.draw(st.integers(1, size - at)) for size, at in zip(tensor.shape, offsets, strict=True))
            piece = TensorSlice(name, tuple(tensor.shape), offsets, sizes)
            counted, read = checkpoint.bytes_read, bytes_from_files()
            found = checkpoint.read_state(kind, piece)
            read = bytes_from_files() - read - overhead
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor[piece.to_index()])
            assert checkpoint.bytes_read - counted == found.nbytes
            assert read <= found.nbytes + 16  # the counter itself may have one more digit
            if kind == "weights":
                assert torch.equal(checkpoint.read(piece), found)

        check()


def test_the_commit_file_describes_the_checkpoint(saved: tuple[Path, FullTensors]) -> None:
    directory, full = saved
    with Checkpoint(LocalStorage(directory)) as checkpoint:
        assert checkpoint.step == 7
        assert {kind: checkpoint.dtypes[kind] for kind in full} == {
            kind: next(iter(tensors.values())).dtype for kind, tensors in full.items()
        }
        for rank in range(len(checkpoint.files)):
            extras = checkpoint.rank_extras(rank)
            assert extras is not None
            assert extras[0][f"random.host.{rank}"].tolist() == [0, 1, 2, 3, 4]
            assert extras[1]["RANDOM"] == str(rank)
        assert checkpoint.rank_extras(len(checkpoint.files)) is None


def test_incomplete_checkpoints_are_refused(tmp_path: Path) -> None:
    config = configure("llama", "dp3")
    write(tmp_path / "one", config, 3)
    with pytest.raises(UserError, match=r"not a checkpoint: it has no complete.json"):
        Checkpoint(LocalStorage(tmp_path / "nothing"))
    with Checkpoint(LocalStorage(tmp_path / "one")) as checkpoint:
        too_large = TensorSlice.full("norm.weight", (33,))
        with pytest.raises(CorruptCheckpoint, match=r"one: norm.weight is incomplete"):
            checkpoint.read_state("weights", too_large)
        unknown = TensorSlice.full("no.weight", (2,))
        with pytest.raises(CorruptCheckpoint, match=r"one: no.weight is incomplete"):
            checkpoint.read_state("weights", unknown)
    blueprint = models.family_of(config.model).blueprint(config.model)
    (tmp_path / "one" / "rank_00001.safetensors").unlink()
    (tmp_path / "one" / "complete.json").unlink()
    with pytest.raises(UserError, match=r"rank_00001.safetensors: not visible on this host; .* shared by all hosts"):
        native_checkpoint.commit(
            LocalStorage(tmp_path / "one"),
            native_checkpoint.build_shard_table(blueprint, Layout.from_config(config, 3)),
            {},
        )
    assert not (tmp_path / "one" / "complete.json").exists()


def test_a_file_of_another_checkpoint_is_detected(tmp_path: Path) -> None:
    """The file is intact and has the right size, but not the slices that the commit file lists."""
    for name, directory in (("tp4", "a"), ("tp2-pp2", "b")):
        write(tmp_path / directory, configure("llama", name), 4)
    other = (tmp_path / "b" / "rank_00000.safetensors").read_bytes()
    (tmp_path / "a" / "rank_00000.safetensors").write_bytes(other)
    text = (tmp_path / "a" / "complete.json").read_text().splitlines()[0]
    body = json.loads(text)
    body["files"]["rank_00000.safetensors"]["bytes"] = len(other)
    storage = LocalStorage(tmp_path / "a")
    with storage.write("complete.json") as file:
        line = json.dumps(body)

        file.write(f"{line}\n{zlib.crc32(line.encode()):08x}\n".encode())
    with (
        Checkpoint(storage) as checkpoint,
        pytest.raises(CorruptCheckpoint, match=r"rank_00000.safetensors: corrupt: .* is not what"),
    ):
        checkpoint.verify(checkpoint.files)


def test_a_commit_file_of_a_later_version_is_refused(tmp_path: Path) -> None:

    line = json.dumps({"format": 99})
    (tmp_path / "complete.json").write_text(f"{line}\n{zlib.crc32(line.encode()):08x}\n")
    with pytest.raises(UserError, match=r"complete.json: format 99; this version reads 1"):
        Checkpoint(LocalStorage(tmp_path))


def steps(storage: LocalStorage, *complete: int, incomplete: tuple[int, ...] = ()) -> None:
    for step in (*complete, *incomplete):
        directory = storage / native_checkpoint.step_directory(step)
        directory.mkdir()
        for name in ("rank_00000.safetensors", *(["complete.json"] if step in complete else [])):
            with directory.write(name) as file:
                file.write(b"1")


def test_checkpoints_are_listed_cleaned_up_and_pruned(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    steps(storage, 1, 20, 100_000_000, 3, incomplete=(2, 99))
    for name in (".x.part", ".keep", "notes.txt", "step_1"):
        (tmp_path / name).write_text("")
    assert native_checkpoint.list_steps(storage) == [100_000_000, 99, 20, 3, 2, 1]
    assert [
        step for step in native_checkpoint.list_steps(storage) if native_checkpoint.is_committed(storage, step)
    ] == [
        100_000_000,
        20,
        3,
        1,
    ]
    native_checkpoint.remove_incomplete(storage)
    assert native_checkpoint.list_steps(storage) == [100_000_000, 20, 3, 1]
    assert {".keep", "notes.txt", "step_1"} <= set(storage.listdir())  # the user's files stay
    assert ".x.part" not in storage.listdir()

    def is_own(step: int) -> bool:
        return True

    native_checkpoint.prune_checkpoints(storage, 20, 0, is_own)
    assert native_checkpoint.list_steps(storage) == [100_000_000, 20, 3, 1]
    native_checkpoint.prune_checkpoints(storage, 20, 2, is_own)
    assert native_checkpoint.list_steps(storage) == [100_000_000, 20, 3]
    native_checkpoint.prune_checkpoints(storage, 20, 1, is_own)
    assert native_checkpoint.list_steps(storage) == [100_000_000, 20]
    native_checkpoint.remove_checkpoint(storage, 5)
    native_checkpoint.remove_checkpoint(storage, 20)
    assert native_checkpoint.list_steps(storage) == [100_000_000]

"""Every reader of a checkpoint checks the checksums of what it reads, not only a run that resumes."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support import configs
from tests.support.forkserver import ForkServer
from trainyard import Trainer
from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.checkpoint.weights import local_values, unfused_tensors
from trainyard.core.errors import UserError
from trainyard.core.splits import ModelShard
from trainyard.formats.compare import compare_logits
from trainyard.formats.registry import open_weights
from trainyard.remote.storage import LocalStorage

EMBEDDING = "embedding.weight"
TARGETS = {
    "hf": ["--to", "hf"],
    "nxd": ["--to", "nxd", "--layout", "tp=2"],
    "native": ["--to", "native"],
    "native at another layout": ["--to", "native", "--layout", "tp=2,dp=2"],
    "native without optimizer state": ["--to", "native", "--weights-only"],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    config = configs.tiny_config(train={"steps": 1}, checkpoint={"every": 1}, log={"directory": str(directory)})
    Trainer(config).run()
    return directory / "run" / "checkpoints" / "step_00000001"


def flip_last_bit(shard: Path, key: str) -> None:
    """Flip the last bit of a tensor, in the last row and column."""
    data = bytearray(shard.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + json.loads(data[8:start])[key]["data_offsets"][1] - 1] ^= 1
    shard.write_bytes(data)


@pytest.fixture
def corrupt(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint with one flipped bit in the embedding."""
    shutil.copytree(saved, tmp_path / "corrupt")
    flip_last_bit(tmp_path / "corrupt" / "rank_00000.safetensors", f"weights.{EMBEDDING}")
    return tmp_path / "corrupt"


@pytest.mark.parametrize("target", TARGETS)
def test_a_flipped_bit_is_not_converted(target: str, corrupt: Path, cli: ForkServer, tmp_path: Path) -> None:
    """Guards against writing changed weights, and against new valid checksums for them."""
    done = cli.run(["convert", "corrupt", "out", *TARGETS[target]], cwd=tmp_path)
    problem = f"corrupt: the checksum of weights.{EMBEDDING} differs"
    assert (done.returncode, done.stderr) == (2, f"trainyard: corrupt/rank_00000.safetensors: {problem}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["corrupt"]


def test_a_flipped_bit_of_a_moment_is_not_converted_with_the_state(
    saved: Path, cli: ForkServer, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "corrupt")
    flip_last_bit(tmp_path / "corrupt" / "rank_00000.safetensors", f"second.{EMBEDDING}")
    done = cli.run(["convert", "corrupt", "out", "--to", "native"], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith(f"the checksum of second.{EMBEDDING} differs\n")
    assert cli.run(["convert", "corrupt", "out", "--to", "hf"], cwd=tmp_path).returncode == 0  # it reads no moments


@pytest.mark.parametrize("key", ["resume", "init_from"])
def test_a_run_does_not_start_from_weights_with_a_flipped_bit(key: str, corrupt: Path, tmp_path: Path) -> None:
    section = {key: str(corrupt), "weights_only": key == "resume"}
    with pytest.raises(UserError, match=rf"corrupt: the checksum of weights\.{EMBEDDING} differs"):
        Trainer(configs.tiny_config(checkpoint=section, log={"directory": str(tmp_path / "logs")}))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_is_verified_even_if_a_rank_reads_another_part_of_it(rank: int, corrupt: Path) -> None:
    with pytest.raises(UserError, match="checksum"):
        local_values(open_weights(corrupt).weights, ModelShard(2, rank))(EMBEDDING)


def test_a_flipped_bit_is_not_compared(saved: Path, corrupt: Path) -> None:
    weights = open_weights(saved).weights
    assert compare_logits(weights, open_weights(saved).weights).max_difference == 0
    with pytest.raises(UserError, match="checksum"):
        compare_logits(weights, open_weights(corrupt).weights)


def test_a_verified_checkpoint_is_read_once(saved: Path) -> None:
    """A resumed run, whose ranks have verified all files together, reads only the bytes that each needs."""
    with Checkpoint(LocalStorage(saved)) as checkpoint:
        checkpoint.all_verified = True
        full = unfused_tensors(checkpoint.model)[EMBEDDING]
        checkpoint.read(full.narrow(0, 0, 1))
        assert checkpoint.bytes_read == full.numel // full.sizes[0] * checkpoint.dtype(EMBEDDING).itemsize

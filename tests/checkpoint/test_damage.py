"""Corrupt checkpoint files are named in one line and skipped, and every changed bit is detected."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.saved_runs import checkpoint_config, mentions, save_failures, train, verified_steps
from tests.support import configs
from tests.support.examples import SCALE, examples
from trainyard import Trainer
from trainyard.checkpoint import checkpoint as native_checkpoint
from trainyard.checkpoint.weights import unfused_tensors
from trainyard.core.errors import UserError
from trainyard.remote.storage import LocalStorage

SHARD, COMMIT = "rank_00000.safetensors", "complete.json"


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated": (SHARD, lambda path: truncate(path, 1000), r"{}: corrupt: 1,000 bytes of [\d,]+"),
    "empty": (SHARD, lambda path: truncate(path, 0), r"{}: corrupt: 0 bytes of [\d,]+"),
    "longer": (SHARD, lambda path: path.write_bytes(path.read_bytes() + b"1"), r"{}: corrupt: [\d,]+ bytes of [\d,]+"),
    "flipped bit": (
        SHARD,
        lambda path: flip_bit(path, 8 * path.stat().st_size - 9),
        "{}: corrupt: the checksum of .* differs",
    ),
    "header": (SHARD, lambda path: flip_bit(path, 8 * 2000), "{}: corrupt: .*"),
    "missing": (SHARD, Path.unlink, "{}: corrupt: No such file or directory"),
    "commit file truncated": (COMMIT, lambda path: truncate(path, 100), "{}: corrupt: its checksum differs"),
    "commit file empty": (COMMIT, lambda path: truncate(path, 0), "{}: corrupt: its checksum differs"),
    "commit file flipped bit": (COMMIT, lambda path: flip_bit(path, 800), "{}: corrupt: its checksum differs"),
    "commit file not text": (COMMIT, lambda path: path.write_bytes(b"\xff" * 100), "{}: corrupt: cannot be read"),
}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with checkpoints of steps 3 and 4."""
    directory = tmp_path_factory.mktemp("finished")
    train(checkpoint_config(directory, resume="auto", keep=2))
    return directory


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupt_checkpoint_is_named_and_the_previous_one_is_used(
    finished_run: Path, tmp_path: Path, damage: str
) -> None:
    file, apply_damage, message = DAMAGES[damage]
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    checkpoints = tmp_path / "logs" / "run" / "checkpoints"
    intact = {path: path.read_bytes() for path in checkpoints.rglob("*.safetensors")}
    path = checkpoints / "step_00000004" / file
    apply_damage(path)
    messages = train(checkpoint_config(tmp_path, resume="auto", keep=2))
    (skipped,) = mentions(messages, path)
    assert re.fullmatch(f"skipping {message.format(path)}", skipped)
    previous = checkpoints / "step_00000003"
    assert mentions(messages, previous) == [f"resuming from step 3: {previous}"]
    assert save_failures(messages) == []
    assert verified_steps(checkpoints) == [4, 3]  # an intact one replaced the corrupt one
    assert intact == {path: path.read_bytes() for path in checkpoints.rglob("*.safetensors")}
    apply_damage(path)
    with pytest.raises(UserError, match="corrupt") as error:
        train(checkpoint_config(tmp_path, resume=str(path.parent)))
    assert re.fullmatch(message.format(path), str(error.value))


def test_corrupt_checkpoints_do_not_displace_intact_ones(tmp_path: Path) -> None:
    """With keep=1 and a corrupt latest checkpoint, what the resumed run writes below it must stay."""
    train(checkpoint_config(tmp_path, resume="auto", every=2, keep=0))
    checkpoints = tmp_path / "logs" / "run" / "checkpoints"
    assert verified_steps(checkpoints) == [4, 2]
    flip_bit(checkpoints / "step_00000004" / SHARD, 8 * 30_000)
    listings: list[list[str]] = []
    config = checkpoint_config(tmp_path, resume="auto", every=1, keep=1, blocking=True)
    train(config, {4: lambda: listings.append(sorted(os.listdir(checkpoints)))})
    assert listings == [["step_00000003", "step_00000004"]]
    assert verified_steps(checkpoints) == [4]


def test_an_uncommitted_checkpoint_is_skipped_and_named(finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    checkpoints = tmp_path / "logs" / "run" / "checkpoints"
    uncommitted, previous = checkpoints / "step_00000004", checkpoints / "step_00000003"
    (uncommitted / COMMIT).unlink()
    messages = train(checkpoint_config(tmp_path, resume="auto", keep=2))
    assert mentions(messages, uncommitted) == [f"skipping {uncommitted}: it was never completed"]
    assert mentions(messages, previous) == [f"resuming from step 3: {previous}"]
    assert verified_steps(checkpoints) == [4, 3]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint so small that headers are a large part of it."""
    directory = tmp_path_factory.mktemp("saved")
    model = {**configs.LLAMA, "vocab": 64, "hidden": 8, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 8}
    config = configs.tiny_config(model, train={"steps": 1}, checkpoint={"every": 1}, log={"directory": str(directory)})
    Trainer(config).run()
    return directory / "run" / "checkpoints" / "step_00000001"


def read_all(directory: Path) -> tuple[dict[str, Any], list[tuple[str, torch.Tensor]], Any]:
    """Everything that a resumed run can read from a checkpoint."""
    with native_checkpoint.Checkpoint(LocalStorage(directory)) as checkpoint:
        checkpoint.verify(checkpoint.files)
        tensors = [
            (f"{kind}.{name}", checkpoint.read_state(kind, tensor))
            for kind in native_checkpoint.STATE_KINDS
            for name, tensor in unfused_tensors(checkpoint.model).items()
        ]
        extras = checkpoint.rank_extras(0)
        assert extras
        tensors += sorted(extras[0].items())
        metadata = {name: text for name, text in extras[1].items() if name in ("RANDOM", "DCP_SHARDING_INFO")}
        return checkpoint.manifest, tensors, metadata


def same(a: Any, b: Any) -> bool:
    names = [[name for name, _ in content[1]] for content in (a, b)]
    return (
        (a[0], a[2]) == (b[0], b[2])
        and names[0] == names[1]
        and all(torch.equal(x, y) for (_, x), (_, y) in zip(a[1], b[1], strict=True))
    )


@pytest.mark.parametrize("name", [SHARD, COMMIT])
def test_every_flipped_bit_is_detected(saved: Path, tmp_path: Path, name: str) -> None:
    """A flipped bit anywhere in a file is detected, or has no effect."""
    directory = tmp_path / "copy"
    shutil.copytree(saved, directory)
    before = read_all(saved)
    path = directory / name
    intact = path.read_bytes()
    header_size = 8 + int.from_bytes(intact[:8], "little") if name == SHARD else len(intact)
    detected = 0

    @examples(400, database=None, derandomize=True)
    @given(st.one_of(st.integers(0, 8 * header_size - 1), st.integers(0, 8 * len(intact) - 1)))
    def check(bit: int) -> None:
        nonlocal detected
        path.write_bytes(intact)
        flip_bit(path, bit)
        try:
            after = read_all(directory)
        except UserError:
            detected += 1
        else:
            assert same(before, after)

    check()
    assert detected > 100 * min(SCALE, 1)


@examples(60, database=None, derandomize=True)
@given(st.data())
def test_truncated_and_overwritten_files_are_detected(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    directory = tmp_path_factory.mktemp("overwritten") / "copy"
    shutil.copytree(saved, directory)
    path = directory / data.draw(st.sampled_from([SHARD, COMMIT]))
    intact = path.read_bytes()
    start = data.draw(st.integers(0, len(intact) - 1))
    junk = data.draw(st.sampled_from([b"", b"\0" * 64, os.urandom(64), b"\xff" * len(intact)]))
    path.write_bytes(intact[:start] + junk + (intact[start + len(junk) :] if junk else b""))
    if path.read_bytes() == intact:
        return
    with pytest.raises(UserError) as error:
        read_all(directory)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)

"""Files that hold something else than was written: named in one line and passed over; no changed bit goes unseen."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.saved_runs import checkpoint_config, save_failures, train, verified_steps
from tests.support import configs
from trainyard import Trainer
from trainyard.checkpoint.formats.tensor_map import unfused_tensors
from trainyard.checkpoint.io.storage import LocalStorage
from trainyard.checkpoint.native import checkpoint as native_checkpoint
from trainyard.core.errors import UserError

RANK, MARKER = "rank_00000.safetensors", "complete.json"


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def cut(path: Path, left: int) -> None:
    path.write_bytes(path.read_bytes()[:left])


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "cut": (RANK, lambda path: cut(path, 1000), r"{}: broken: 1,000 bytes of [\d,]+"),
    "empty": (RANK, lambda path: cut(path, 0), r"{}: broken: 0 bytes of [\d,]+"),
    "longer": (RANK, lambda path: path.write_bytes(path.read_bytes() + b"1"), r"{}: broken: [\d,]+ bytes of [\d,]+"),
    "flipped": (RANK, lambda path: flip(path, 8 * path.stat().st_size - 9), "{}: broken: the checksum of .* differs"),
    "header": (RANK, lambda path: flip(path, 8 * 2000), "{}: broken: .*"),
    "missing": (RANK, Path.unlink, "{}: broken: No such file or directory"),
    "marker cut": (MARKER, lambda path: cut(path, 100), "{}: broken: its checksum differs"),
    "marker empty": (MARKER, lambda path: cut(path, 0), "{}: broken: its checksum differs"),
    "marker flipped": (MARKER, lambda path: flip(path, 800), "{}: broken: its checksum differs"),
    "marker not text": (MARKER, lambda path: path.write_bytes(b"\xff" * 100), "{}: broken: it cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path: Path, damage: str) -> None:
    name, harm, text = DAMAGES[damage]
    config = checkpoint_config(tmp_path, resume="auto", keep=2)
    train(config)
    where = tmp_path / "logs" / "run" / "checkpoints"
    plain = {path: path.read_bytes() for path in where.rglob("*.safetensors")}
    path = where / "step_00000004" / name
    harm(path)
    said = train(config)
    passing = [line for line in said if line.startswith("passing over")]
    assert len(passing) == 1
    assert re.fullmatch(f"passing over {text.format(path)}", passing[0])
    assert f"going on from step 3: {where / 'step_00000003'}" in said
    assert save_failures(said) == []
    assert verified_steps(where) == [4, 3]  # a whole one has taken its place
    assert plain == {path: path.read_bytes() for path in where.rglob("*.safetensors")}
    harm(path)
    with pytest.raises(UserError, match="broken") as told:
        train(checkpoint_config(tmp_path, resume=str(path.parent)))
    assert re.fullmatch(text.format(path), str(told.value))


def test_damaged_checkpoints_do_not_push_out_whole_ones(tmp_path: Path) -> None:
    """keep=1, and the newest is broken: what the resumed run writes below it must stay."""
    config = checkpoint_config(tmp_path, resume="auto", every=2, keep=0)
    train(config)
    where = tmp_path / "logs" / "run" / "checkpoints"
    assert verified_steps(where) == [4, 2]
    flip(where / "step_00000004" / RANK, 8 * 30_000)
    seen: list[list[str]] = []
    again = checkpoint_config(tmp_path, resume="auto", every=1, keep=1, blocking=True)
    train(again, {4: lambda: seen.append(sorted(os.listdir(where)))})
    assert seen == [["step_00000003", "step_00000004"]]
    assert verified_steps(where) == [4]


def test_a_directory_without_a_marker_is_passed_over_and_named(tmp_path: Path) -> None:
    config = checkpoint_config(tmp_path, resume="auto")
    train(config)
    where = tmp_path / "logs" / "run" / "checkpoints"
    (where / "step_00000004" / MARKER).unlink()
    said = train(config)
    assert f"passing over {where / 'step_00000004'}: it was never completed" in said
    assert f"going on from step 3: {where / 'step_00000003'}" in said
    assert verified_steps(where) == [4, 3, 2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, small so that headers are a large part of it."""
    directory = tmp_path_factory.mktemp("saved")
    model = {**configs.LLAMA, "vocab": 64, "hidden": 8, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 8}
    config = configs.tiny_config(model, train={"steps": 1}, checkpoint={"every": 1}, log={"directory": str(directory)})
    Trainer(config).run()
    return directory / "run" / "checkpoints" / "step_00000001"


def everything(directory: Path) -> tuple[dict[str, Any], list[tuple[str, torch.Tensor]], Any]:
    """All that a resumed run could take from a checkpoint."""
    with native_checkpoint.Checkpoint(LocalStorage(directory)) as checkpoint:
        checkpoint.verify(checkpoint.files)
        tensors = []
        for kind in native_checkpoint.STATE_KINDS:
            for name, tensor in unfused_tensors(checkpoint.model).items():
                tensors.append((f"{kind}.{name}", checkpoint.read_state(kind, tensor)))
        own = checkpoint.rank_extras(0)
        assert own
        tensors += sorted(own[0].items())
        texts = {name: text for name, text in own[1].items() if name in ("RANDOM", "DCP_SHARDING_INFO")}
        return checkpoint.manifest, tensors, texts


def same(one: Any, two: Any) -> bool:
    names = [[name for name, _ in each[1]] for each in (one, two)]
    return (
        (one[0], one[2]) == (two[0], two[2])
        and names[0] == names[1]
        and all(torch.equal(a, b) for (_, a), (_, b) in zip(one[1], two[1], strict=True))
    )


@pytest.mark.parametrize("name", [RANK, MARKER])
def test_no_flipped_bit_goes_unseen(saved: Path, tmp_path: Path, name: str) -> None:
    """Anywhere in any file: found, or without effect."""
    directory = tmp_path / "copy"
    shutil.copytree(saved, directory)
    before = everything(saved)
    path = directory / name
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little") if name == RANK else len(whole)
    found = 0

    @settings(max_examples=400, deadline=None, database=None, derandomize=True)
    @given(st.one_of(st.integers(0, 8 * header - 1), st.integers(0, 8 * len(whole) - 1)))
    def check(bit: int) -> None:
        nonlocal found
        path.write_bytes(whole)
        flip(path, bit)
        try:
            after = everything(directory)
        except UserError:
            found += 1
        else:
            assert same(before, after)

    check()
    assert found > 100


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_no_cut_or_scribbled_file_goes_unseen(saved: Path, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    directory = tmp_path_factory.mktemp("scribbled") / "copy"
    shutil.copytree(saved, directory)
    path = directory / data.draw(st.sampled_from([RANK, MARKER]))
    whole = path.read_bytes()
    start = data.draw(st.integers(0, len(whole) - 1))
    junk = data.draw(st.sampled_from([b"", b"\0" * 64, os.urandom(64), b"\xff" * len(whole)]))
    path.write_bytes(whole[:start] + junk + (whole[start + len(junk) :] if junk else b""))
    if path.read_bytes() == whole:
        return
    with pytest.raises(UserError) as told:
        everything(directory)
    assert "\n" not in str(told.value)
    assert str(path) in str(told.value)

"""What goes wrong on disks: full, read-only, taken away, or holding other bits than were written. One line says so, and
the run goes on, or goes on from the checkpoint before."""

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiny
from trainyard import Hook, Trainer
from trainyard.checkpoint import places, store
from trainyard.checkpoint.boxes import Box
from trainyard.checkpoint.pieces import shapes_of
from trainyard.checkpoint.places import LocalPlace, open_place
from trainyard.cli.main import main
from trainyard.config.schema import Config
from trainyard.errors import RunStopped, UserError
from trainyard.train.hooks import Run

MIB = 2**20


class At(Hook):
    """Does something after a step, before its checkpoint is begun."""

    def __init__(self, actions: dict[int, Callable[[], object]]) -> None:
        self.actions = actions

    def on_step(self, trainer: Run, number: int) -> None:
        self.actions.get(number, lambda: None)()


def configure(tmp_path: Path, **checkpoint: Any) -> Config:
    section = {"every": 1, "final": False, **checkpoint}
    return tiny.config(train={"steps": 4}, checkpoint=section, log={"directory": str(tmp_path / "logs")})


def train(config: Config, actions: dict[int, Callable[[], object]] | None = None) -> list[str]:
    """What a run says."""
    said: list[str] = []
    Trainer(config, hooks=[At(actions or {})], say=said.append).run()
    assert all("\n" not in line for line in said)
    return said


def failures(said: list[str]) -> list[str]:
    return [line for line in said if line.startswith("checkpoint of step")]


def complete(where: Path) -> list[int]:
    """Complete steps, each of them whole."""
    place = open_place(where)
    found = [step for step in store.steps_in(place) if store.is_complete(place, step)]
    for step in found:
        with store.Checkpoint(place / store.directory_name(step)) as checkpoint:
            checkpoint.check(checkpoint.files)
    return found


# Disks that are full, or read-only.


class Disk(Protocol):
    path: Path

    def fill(self, leave: int) -> None: ...

    def empty(self) -> None: ...


class Mounted:
    """A file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, leave: int) -> None:
        free = shutil.disk_usage(self.path).free
        with (self.path / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(free - leave, 1))

    def empty(self) -> None:
        (self.path / "filler").unlink()


class Planted:
    """The same for those who may not mount: the system's answers are made up."""

    def __init__(self, path: Path, size: int, patch: pytest.MonkeyPatch) -> None:
        self.path, self.size = path, size
        self.filled = 0
        path.mkdir()
        whole = places.whole_file
        usage = shutil.disk_usage

        @contextmanager
        def full_file(path: Path) -> Iterator[Any]:
            disk, written = self, 0

            class Full:
                def write(self, data: Any) -> None:
                    nonlocal written
                    written += len(data)
                    if written > disk.free():
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    file.write(data)

            with whole(path) as file:
                yield Full() if path.is_relative_to(self.path) else file

        def here(where: Path) -> Any:
            found = usage(where)
            return found._replace(free=self.free()) if Path(where).is_relative_to(self.path) else found

        patch.setattr(places, "whole_file", full_file)
        patch.setattr(places.shutil, "disk_usage", here)  # type: ignore[attr-defined]

    def free(self) -> int:
        used = sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())
        return max(self.size - self.filled - used, 0)

    def fill(self, leave: int) -> None:
        self.filled = max(self.free() - leave, 0)

    def empty(self) -> None:
        self.filled = 0


def mount(path: Path, options: str) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}; the planted disk is tested instead")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mount(path, f"size={6 * MIB}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture(params=["mounted", "planted"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    if request.param == "mounted":
        return Mounted(request.getfixturevalue("mounted"))
    return Planted(tmp_path / "disk", 6 * MIB, monkeypatch)


def test_too_little_room_is_said_before_the_first_step(disk: Disk, tmp_path: Path) -> None:
    disk.fill(leave=MIB + 1000)
    config = configure(tmp_path, directory=str(disk.path / "saved"))
    trainer = Trainer(config)
    with pytest.raises(UserError, match=r"checkpoint.directory=.*needs 2 MiB, 1 MiB are free") as told:
        trainer.run()
    assert "\n" not in str(told.value)
    assert trainer.number == 0


@pytest.mark.parametrize("blocking", [False, True])
def test_a_run_goes_on_over_a_full_disk_and_saves_again_later(disk: Disk, tmp_path: Path, blocking: bool) -> None:
    where = disk.path / "saved"
    actions = {2: lambda: disk.fill(leave=MIB + 1000), 4: disk.empty}
    said = train(configure(tmp_path, directory=str(where), blocking=blocking), actions)
    line = f"checkpoint of step {{}} was not written: {where}: a checkpoint needs 2 MiB, 1 MiB are free"
    assert failures(said) == [line.format(2), line.format(3)]
    assert complete(where) == [4, 1]
    assert sorted(path.name for path in where.iterdir()) == ["step_00000001", "step_00000004"]


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "complete.json"])
def test_the_disk_fills_in_the_middle_of_a_write(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    where = disk.path / "saved"
    write = LocalPlace.write

    @contextmanager
    def filling(place: LocalPlace, file_name: str) -> Iterator[Any]:
        with write(place, file_name) as file:
            if (place.path.name, file_name) == ("step_00000002", name):
                file.write(b"{")
                disk.fill(leave=0)
            yield file

    monkeypatch.setattr(LocalPlace, "write", filling)
    found: list[list[Path]] = []
    actions = {3: lambda: (found.append(sorted(where.rglob("*"))), disk.empty())}
    said = train(configure(tmp_path, directory=str(where), blocking=True), actions)
    assert len(failures(said)) == 1
    assert failures(said)[0].startswith("checkpoint of step 2 was not written: ")
    assert failures(said)[0].endswith("No space left on device")
    assert not any(path.suffix == ".part" for path in found[0])
    assert where / "step_00000002" / "complete.json" not in found[0]
    assert complete(where) == [4, 3, 1]


def test_the_run_stops_when_asked_to(tmp_path: Path) -> None:
    where = tmp_path / "saved"
    config = configure(tmp_path, directory=str(where), on_failure="stop", blocking=True)

    def taken() -> None:
        shutil.rmtree(where)
        where.write_text("")

    with pytest.raises(RunStopped, match=r"checkpoint of step 3 was not written: .*on_failure=stop") as told:
        train(config, {3: taken})
    assert "\n" not in str(told.value)


def test_the_command_ends_with_one_line_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "marker")

    monkeypatch.setattr(store, "seal", full)
    words = ["checkpoint.every=1", "checkpoint.on_failure=stop", f"log.directory={tmp_path}", "log.tensorboard=false"]
    monkeypatch.setattr(sys, "argv", ["trainyard", "train", "tiny-llama", "--smoke", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    line = "checkpoint of step 1 was not written: marker: No space left on device (checkpoint.on_failure=stop)"
    assert capsys.readouterr().err == f"trainyard: {line}\n"


def test_a_disk_that_is_read_only_for_a_while(mounted: Path, tmp_path: Path) -> None:
    def again(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(mounted)], check=True)

    config = configure(tmp_path, directory=str(mounted / "saved"), blocking=True)
    said = train(config, {2: lambda: again("ro"), 4: lambda: again("rw")})
    assert [line.split(":")[0] for line in failures(said)] == [
        f"checkpoint of step {n} was not written" for n in (2, 3)
    ]
    assert all(line.endswith("Read-only file system") for line in failures(said))
    assert complete(mounted / "saved") == [4, 1]
    again("ro")
    with pytest.raises(UserError, match=r"^checkpoint.directory=.*: cannot be written: .*Read-only file system$"):
        Trainer(config).run()


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "file", tmp_path / "file" / "saved"):
        with pytest.raises(UserError, match=r"^checkpoint.directory=.*: cannot be written: .*(File exists|Not a dir)"):
            train(configure(tmp_path, directory=str(where)))


def test_the_directory_is_removed_under_the_run(tmp_path: Path) -> None:
    where = tmp_path / "saved"
    said = train(configure(tmp_path, directory=str(where), blocking=True), {3: lambda: shutil.rmtree(where)})
    assert failures(said) == []
    assert complete(where) == [4, 3]


def test_the_directory_is_removed_under_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = tmp_path / "saved"
    write = LocalPlace.write

    @contextmanager
    def removing(place: LocalPlace, name: str) -> Iterator[Any]:
        with write(place, name) as file:
            yield file
            if place.path.name == "step_00000002":
                shutil.rmtree(where)

    monkeypatch.setattr(LocalPlace, "write", removing)
    said = train(configure(tmp_path, directory=str(where)))
    assert len(failures(said)) == 1
    assert "checkpoint of step 2 was not written" in failures(said)[0]
    assert failures(said)[0].endswith("No such file or directory")
    assert complete(where) == [4, 3]


def test_leftovers_do_not_take_the_room_of_the_next_checkpoint(disk: Disk, tmp_path: Path) -> None:
    """What a killed run has half written is cleared away before the room is measured."""
    where = disk.path / "saved"
    config = configure(tmp_path, directory=str(where), resume="auto")
    train(config.model_copy(update={"train": config.train.model_copy(update={"steps": 1})}))
    (where / "step_00000002").mkdir()
    (where / "step_00000002" / ".rank_00000.safetensors.x.part").write_bytes(b"1" * (4 * MIB))
    said = train(config)
    assert f"passing over {where / 'step_00000002'}: it was never completed" in said
    assert failures(said) == []
    assert complete(where)[0] == 4


# Files that hold something else than was written.

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
    config = configure(tmp_path, resume="auto", keep=2)
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
    assert failures(said) == []
    assert complete(where) == [4, 3]  # a whole one has taken its place
    assert plain == {path: path.read_bytes() for path in where.rglob("*.safetensors")}
    harm(path)
    with pytest.raises(UserError, match="broken") as told:
        train(configure(tmp_path, resume=str(path.parent)))
    assert re.fullmatch(text.format(path), str(told.value))


def test_damaged_checkpoints_do_not_push_out_whole_ones(tmp_path: Path) -> None:
    """keep=1, and the newest is broken: what the resumed run writes below it must stay."""
    config = configure(tmp_path, resume="auto", every=2, keep=0)
    train(config)
    where = tmp_path / "logs" / "run" / "checkpoints"
    assert complete(where) == [4, 2]
    flip(where / "step_00000004" / RANK, 8 * 30_000)
    seen: list[list[str]] = []
    again = configure(tmp_path, resume="auto", every=1, keep=1, blocking=True)
    train(again, {4: lambda: seen.append(sorted(os.listdir(where)))})
    assert seen == [["step_00000003", "step_00000004"]]
    assert complete(where) == [4]


def test_a_directory_without_a_marker_is_passed_over_and_named(tmp_path: Path) -> None:
    config = configure(tmp_path, resume="auto")
    train(config)
    where = tmp_path / "logs" / "run" / "checkpoints"
    (where / "step_00000004" / MARKER).unlink()
    said = train(config)
    assert f"passing over {where / 'step_00000004'}: it was never completed" in said
    assert f"going on from step 3: {where / 'step_00000003'}" in said
    assert complete(where) == [4, 3, 2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, small so that headers are a large part of it."""
    directory = tmp_path_factory.mktemp("saved")
    model = {**tiny.LLAMA, "vocab": 64, "hidden": 8, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 8}
    config = tiny.config(model, train={"steps": 1}, checkpoint={"every": 1}, log={"directory": str(directory)})
    Trainer(config).run()
    return directory / "run" / "checkpoints" / "step_00000001"


def everything(directory: Path) -> tuple[dict[str, Any], list[tuple[str, torch.Tensor]], Any]:
    """All that a resumed run could take from a checkpoint."""
    with store.Checkpoint(LocalPlace(directory)) as checkpoint:
        checkpoint.check(checkpoint.files)
        tensors = []
        for kind in store.KINDS:
            for part, shape in shapes_of(checkpoint.model).items():
                zero = (0,) * len(shape)
                tensors.append((f"{kind}.{part}", checkpoint.tensor(kind, Box(part, part, shape, zero, shape, zero))))
        own = checkpoint.extra(0)
        assert own
        tensors += sorted(own[0].items())
        texts = {name: text for name, text in own[1].items() if name in ("RANDOM", "DCP_SHARDING_INFO")}
        return checkpoint.body, tensors, texts


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

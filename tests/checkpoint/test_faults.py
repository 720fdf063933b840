"""Disks that are full, read-only or taken away: one line says so, and the run goes on, or stops if asked to."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.checkpoint.saved_runs import checkpoint_config, save_failures, train, verified_steps
from trainyard import Trainer
from trainyard.checkpoint.io import storage
from trainyard.checkpoint.io.storage import LocalStorage
from trainyard.checkpoint.native import checkpoint
from trainyard.cli.main import main
from trainyard.core.errors import RunStopped, UserError

MIB = 2**20


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
        whole = storage.atomic_file
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

        patch.setattr(storage, "atomic_file", full_file)
        patch.setattr(storage.shutil, "disk_usage", here)  # type: ignore[attr-defined]

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
    config = checkpoint_config(tmp_path, directory=str(disk.path / "saved"))
    trainer = Trainer(config)
    with pytest.raises(UserError, match=r"checkpoint.directory=.*needs 2 MiB, 1 MiB are free") as told:
        trainer.run()
    assert "\n" not in str(told.value)
    assert trainer.completed_steps == 0


@pytest.mark.parametrize("blocking", [False, True])
def test_a_run_goes_on_over_a_full_disk_and_saves_again_later(disk: Disk, tmp_path: Path, blocking: bool) -> None:
    where = disk.path / "saved"
    actions = {2: lambda: disk.fill(leave=MIB + 1000), 4: disk.empty}
    said = train(checkpoint_config(tmp_path, directory=str(where), blocking=blocking), actions)
    line = f"checkpoint of step {{}} was not written: {where}: a checkpoint needs 2 MiB, 1 MiB are free"
    assert save_failures(said) == [line.format(2), line.format(3)]
    assert verified_steps(where) == [4, 1]
    assert sorted(path.name for path in where.iterdir()) == ["step_00000001", "step_00000004"]


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "complete.json"])
def test_the_disk_fills_in_the_middle_of_a_write(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    where = disk.path / "saved"
    write = LocalStorage.write

    @contextmanager
    def filling(place: LocalStorage, file_name: str) -> Iterator[Any]:
        with write(place, file_name) as file:
            if (place.path.name, file_name) == ("step_00000002", name):
                file.write(b"{")
                disk.fill(leave=0)
            yield file

    monkeypatch.setattr(LocalStorage, "write", filling)
    found: list[list[Path]] = []
    actions = {3: lambda: (found.append(sorted(where.rglob("*"))), disk.empty())}
    said = train(checkpoint_config(tmp_path, directory=str(where), blocking=True), actions)
    assert len(save_failures(said)) == 1
    assert save_failures(said)[0].startswith("checkpoint of step 2 was not written: ")
    assert save_failures(said)[0].endswith("No space left on device")
    assert not any(path.suffix == ".part" for path in found[0])
    assert where / "step_00000002" / "complete.json" not in found[0]
    assert verified_steps(where) == [4, 3, 1]


def test_the_run_stops_when_asked_to(tmp_path: Path) -> None:
    where = tmp_path / "saved"
    config = checkpoint_config(tmp_path, directory=str(where), on_failure="stop", blocking=True)

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

    monkeypatch.setattr(checkpoint, "commit", full)
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

    config = checkpoint_config(tmp_path, directory=str(mounted / "saved"), blocking=True)
    said = train(config, {2: lambda: again("ro"), 4: lambda: again("rw")})
    assert [line.split(":")[0] for line in save_failures(said)] == [
        f"checkpoint of step {n} was not written" for n in (2, 3)
    ]
    assert all(line.endswith("Read-only file system") for line in save_failures(said))
    assert verified_steps(mounted / "saved") == [4, 1]
    again("ro")
    with pytest.raises(UserError, match=r"^checkpoint.directory=.*: cannot be written: .*Read-only file system$"):
        Trainer(config).run()


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "file", tmp_path / "file" / "saved"):
        with pytest.raises(UserError, match=r"^checkpoint.directory=.*: cannot be written: .*(File exists|Not a dir)"):
            train(checkpoint_config(tmp_path, directory=str(where)))


def test_the_directory_is_removed_under_the_run(tmp_path: Path) -> None:
    where = tmp_path / "saved"
    said = train(checkpoint_config(tmp_path, directory=str(where), blocking=True), {3: lambda: shutil.rmtree(where)})
    assert save_failures(said) == []
    assert verified_steps(where) == [4, 3]


def test_the_directory_is_removed_under_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = tmp_path / "saved"
    write = LocalStorage.write

    @contextmanager
    def removing(place: LocalStorage, name: str) -> Iterator[Any]:
        with write(place, name) as file:
            yield file
            if place.path.name == "step_00000002":
                shutil.rmtree(where)

    monkeypatch.setattr(LocalStorage, "write", removing)
    said = train(checkpoint_config(tmp_path, directory=str(where)))
    assert len(save_failures(said)) == 1
    assert "checkpoint of step 2 was not written" in save_failures(said)[0]
    assert save_failures(said)[0].endswith("No such file or directory")
    assert verified_steps(where) == [4, 3]


def test_an_old_checkpoint_that_cannot_be_removed_is_another_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one is complete all the same."""

    def refused(place: LocalStorage, step: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{place}/{step}")

    monkeypatch.setattr(checkpoint, "remove_checkpoint", refused)
    where = tmp_path / "saved"
    said = train(checkpoint_config(tmp_path, directory=str(where), keep=3, on_failure="stop"))
    line = f"old checkpoints in {where} could not be removed: {where}/1: Permission denied"
    assert [each for each in said if "checkpoint" in each] == [line]
    assert verified_steps(where) == [4, 3, 2, 1]


def test_leftovers_do_not_take_the_room_of_the_next_checkpoint(disk: Disk, tmp_path: Path) -> None:
    """What a killed run has half written is cleared away before the room is measured."""
    where = disk.path / "saved"
    config = checkpoint_config(tmp_path, directory=str(where), resume="auto")
    train(config.model_copy(update={"train": config.train.model_copy(update={"steps": 1})}))
    (where / "step_00000002").mkdir()
    (where / "step_00000002" / ".rank_00000.safetensors.x.part").write_bytes(b"1" * (4 * MIB))
    said = train(config)
    assert f"skipping {where / 'step_00000002'}: it was never completed" in said
    assert save_failures(said) == []
    assert verified_steps(where)[0] == 4

"""Full, read-only and removed disks: one line reports the problem, and the run continues, or stops if configured so."""

import errno
import os
import re
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
from trainyard.checkpoint import checkpoint
from trainyard.cli.main import main
from trainyard.core.errors import NotWritable, RunStopped, UserError
from trainyard.metrics.run_directory import LOCK_FILE
from trainyard.remote import storage
from trainyard.remote.storage import LocalStorage
from trainyard.run.checkpointing import saver

MIB = 2**20


class Disk(Protocol):
    """A small disk that can be filled."""

    path: Path

    def fill(self, leave: int) -> None: ...

    def empty(self) -> None: ...


class MountedDisk:
    """A real file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, leave: int) -> None:
        free = shutil.disk_usage(self.path).free
        with (self.path / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(free - leave, 1))

    def empty(self) -> None:
        (self.path / "filler").unlink()


class SimulatedDisk:
    """A simulation by patched functions, for users who may not mount."""

    def __init__(self, path: Path, size: int, patch: pytest.MonkeyPatch) -> None:
        self.path, self.size = path, size
        self.filled = 0
        path.mkdir()
        atomic_file, disk_usage = storage.atomic_file, shutil.disk_usage

        @contextmanager
        def limited_file(path: Path) -> Iterator[Any]:
            disk, written = self, 0

            class LimitedFile:
                def write(self, data: Any) -> None:
                    nonlocal written
                    written += len(data)
                    if written > disk.free():
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    file.write(data)

            with atomic_file(path) as file:
                yield LimitedFile() if path.is_relative_to(self.path) else file

        def limited_usage(path: Path) -> Any:
            usage = disk_usage(path)
            return usage._replace(free=self.free()) if Path(path).is_relative_to(self.path) else usage

        patch.setattr(storage, "atomic_file", limited_file)
        patch.setattr(storage.shutil, "disk_usage", limited_usage)  # type: ignore[attr-defined]

    def free(self) -> int:
        used = sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())
        return max(self.size - self.filled - used, 0)

    def fill(self, leave: int) -> None:
        self.filled = max(self.free() - leave, 0)

    def empty(self) -> None:
        self.filled = 0


def mount(path: Path, options: str) -> None:
    process = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], capture_output=True, text=True)
    if process.returncode:
        pytest.skip(f"cannot mount: {process.stderr.strip()}; the simulated disk is tested instead")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mount(path, f"size={6 * MIB}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture(params=["mounted", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    if request.param == "mounted":
        return MountedDisk(request.getfixturevalue("mounted"))
    return SimulatedDisk(tmp_path / "disk", 6 * MIB, monkeypatch)


def test_too_little_space_is_reported_before_the_first_step(disk: Disk, tmp_path: Path) -> None:
    disk.fill(leave=MIB + 1000)
    config = checkpoint_config(tmp_path, directory=str(disk.path / "saved"))
    trainer = Trainer(config)
    with pytest.raises(NotWritable, match=r"checkpoint.directory=.*2\.\d MiB, but only 1\.0 MiB are free") as error:
        trainer.run()
    assert "\n" not in str(error.value)
    assert trainer.completed_steps == 0


@pytest.mark.parametrize("blocking", [False, True])
def test_a_run_survives_a_full_disk_and_saves_again_later(disk: Disk, tmp_path: Path, blocking: bool) -> None:
    directory = disk.path / "saved"
    actions = {2: lambda: disk.fill(leave=MIB + 1000), 4: disk.empty}
    messages = train(checkpoint_config(tmp_path, directory=str(directory), blocking=blocking), actions)
    line = "checkpoint of step {} was not written: .*/saved: a checkpoint needs .* MiB, but only .* are free"
    failures = save_failures(messages)
    assert len(failures) == 2
    assert all(re.fullmatch(line.format(step), found) for step, found in zip((2, 3), failures, strict=True))
    assert verified_steps(directory) == [4, 1]
    names = sorted(path.name for path in directory.iterdir() if path.name != LOCK_FILE)
    assert names == ["step_00000001", "step_00000004"]


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "complete.json"])
def test_a_disk_that_fills_during_a_write(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    directory = disk.path / "saved"
    write = LocalStorage.write

    @contextmanager
    def filling_write(directory: LocalStorage, file_name: str) -> Iterator[Any]:
        with write(directory, file_name) as file:
            if (directory.path.name, file_name) == ("step_00000002", name):
                file.write(b"{")
                disk.fill(leave=0)
            yield file

    monkeypatch.setattr(LocalStorage, "write", filling_write)
    listings: list[list[Path]] = []
    actions = {3: lambda: (listings.append(sorted(directory.rglob("*"))), disk.empty())}
    messages = train(checkpoint_config(tmp_path, directory=str(directory), blocking=True), actions)
    assert len(save_failures(messages)) == 1
    assert save_failures(messages)[0].startswith("checkpoint of step 2 was not written: ")
    assert save_failures(messages)[0].endswith("No space left on device")
    assert not any(path.suffix == ".part" for path in listings[0])
    assert directory / "step_00000002" / "complete.json" not in listings[0]
    assert verified_steps(directory) == [4, 3, 1]


@pytest.mark.parametrize("recovers", [True, False])
def test_a_run_has_not_succeeded_without_its_last_checkpoint(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recovers: bool
) -> None:
    """Its save is repeated: the disk may be full for a moment only."""
    directory = disk.path / "saved"
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if recovers and len(pauses) == 2:
            disk.empty()

    monkeypatch.setattr(saver.time, "sleep", pause)
    config, actions = checkpoint_config(tmp_path, directory=str(directory)), {4: lambda: disk.fill(leave=MIB + 1000)}
    if recovers:
        messages = train(config, actions)
        assert [line.split(":")[0] for line in save_failures(messages)] == ["checkpoint of step 4 was not written"] * 3
        assert verified_steps(directory)[0] == 4
    else:
        with pytest.raises(NotWritable, match=r"the last checkpoint, of step 4, could not .*: a checkpoint needs"):
            train(config, actions)
        assert verified_steps(directory)[0] == 3


def test_on_failure_stop_stops_the_run(tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    config = checkpoint_config(tmp_path, directory=str(directory), on_failure="stop", blocking=True)

    def replace_by_file() -> None:
        shutil.rmtree(directory)
        directory.write_text("")

    with pytest.raises(RunStopped, match=r"checkpoint of step 3 was not written: .*on_failure=stop") as error:
        train(config, {3: replace_by_file})
    assert "\n" not in str(error.value)


def test_the_command_exits_with_one_line_and_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "complete.json")

    monkeypatch.setattr(checkpoint, "commit", full)
    overrides = [
        "checkpoint.every=1",
        "checkpoint.on_failure=stop",
        f"log.directory={tmp_path}",
        "log.loggers=[]",
    ]
    monkeypatch.setattr(sys, "argv", ["trainyard", "train", "tiny-llama", "--smoke", *overrides])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 1
    line = "checkpoint of step 1 was not written: complete.json: No space left on device (checkpoint.on_failure=stop)"
    assert capsys.readouterr().err == f"trainyard: {line}\n"


def test_a_disk_that_is_temporarily_read_only(mounted: Path, tmp_path: Path) -> None:
    def remount(mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", str(mounted)], check=True)

    config = checkpoint_config(tmp_path, directory=str(mounted / "saved"), blocking=True)
    messages = train(config, {2: lambda: remount("ro"), 4: lambda: remount("rw")})
    assert [line.split(":")[0] for line in save_failures(messages)] == [
        f"checkpoint of step {n} was not written" for n in (2, 3)
    ]
    assert all(line.endswith("Read-only file system") for line in save_failures(messages))
    assert verified_steps(mounted / "saved") == [4, 1]
    remount("ro")
    again = checkpoint_config(tmp_path, directory=str(mounted / "saved"), resume="auto")
    with pytest.raises(NotWritable, match=r"^checkpoint.directory=.*: cannot be written: .*Read-only file system$"):
        Trainer(again).run()


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "saved"):
        with pytest.raises(UserError, match=r"^checkpoint.directory=.*: cannot be written: .*(File exists|Not a dir)"):
            train(checkpoint_config(tmp_path, directory=str(directory)))


def test_the_directory_is_removed_during_the_run(tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    messages = train(
        checkpoint_config(tmp_path, directory=str(directory), blocking=True), {3: lambda: shutil.rmtree(directory)}
    )
    assert save_failures(messages) == []
    assert verified_steps(directory) == [4, 3]


def test_the_directory_is_removed_during_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "saved"
    write = LocalStorage.write

    @contextmanager
    def removing_write(parent: LocalStorage, name: str) -> Iterator[Any]:
        with write(parent, name) as file:
            yield file
            if parent.path.name == "step_00000002":
                shutil.rmtree(directory)

    monkeypatch.setattr(LocalStorage, "write", removing_write)
    messages = train(checkpoint_config(tmp_path, directory=str(directory)))
    assert len(save_failures(messages)) == 1
    assert "checkpoint of step 2 was not written" in save_failures(messages)[0]
    assert save_failures(messages)[0].endswith("No such file or directory")
    assert verified_steps(directory) == [4, 3]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new checkpoint is complete."""

    def refused(storage: LocalStorage, step: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{storage}/{step}")

    monkeypatch.setattr(checkpoint, "remove_checkpoint", refused)
    directory = tmp_path / "saved"
    messages = train(checkpoint_config(tmp_path, directory=str(directory), keep=3, on_failure="stop"))
    line = f"old checkpoints in {directory} could not be removed: {directory}/1: Permission denied"
    assert [message for message in messages if "checkpoint" in message] == [line]
    assert verified_steps(directory) == [4, 3, 2, 1]


def test_leftover_files_do_not_use_up_the_space_of_the_next_checkpoint(disk: Disk, tmp_path: Path) -> None:
    """Half-written files of a killed run are removed before the free space is checked."""
    directory = disk.path / "saved"
    config = checkpoint_config(tmp_path, directory=str(directory), resume="auto")
    train(config.model_copy(update={"train": config.train.model_copy(update={"steps": 1})}))
    (directory / "step_00000002").mkdir()
    (directory / "step_00000002" / ".rank_00000.safetensors.x.part").write_bytes(b"1" * (4 * MIB))
    messages = train(config)
    assert f"skipping {directory / 'step_00000002'}: it was never completed" in messages
    assert save_failures(messages) == []
    assert verified_steps(directory)[0] == 4

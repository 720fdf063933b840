"""Which run `checkpoint.resume` continues: never another one, never from step 0 without a word, and one process at a
time."""

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.run.test_resume import RunAtStep, checkpoint_path, committed_steps, configure, error_of, losses, train
from tests.support.forkserver import ForkServer
from trainyard import Trainer
from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.metrics.run_directory import RunDirectory, read_identity
from trainyard.remote.storage import open_storage

SMOKE = ["train", "tiny-llama", "--smoke", "log.loggers=[]", "checkpoint.export_hf=false", "evaluate.every=0"]


def named(tmp_path: Path, name: str, steps: int = 2, **checkpoint: Any) -> Config:
    return configure(
        tmp_path,
        train={"steps": steps},
        checkpoint={"resume": "auto", **checkpoint},
        log={"directory": str(tmp_path), "name": name},
    )


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def fail_before_the_first_save(config: Config) -> Path:
    """A fresh start that ends without a checkpoint."""

    def fail() -> None:
        raise KeyboardInterrupt

    trainer = Trainer(config, callbacks=[RunAtStep({1: fail})])
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert trainer.directory
    return trainer.directory


def test_auto_does_not_take_another_run_with_a_similar_name(tmp_path: Path) -> None:
    """exp-8 is a run of its own, not the eighth start of exp."""
    other, _ = train(named(tmp_path, "exp-8"))
    before = contents(other.directory)
    for expected in (1, 3):  # the first start, and a resumed one
        mine, _ = train(named(tmp_path, "exp", expected + 1))
        assert mine.directory == tmp_path / "exp"
        assert list(losses(mine.directory)) == list(range(1, expected + 2))
    assert contents(other.directory) == before
    fresh, _ = train(named(tmp_path, "exp", resume="none"))
    again, lines = train(named(tmp_path, "exp", 3))
    assert (fresh.directory, again.directory) == (tmp_path / "exp-2", tmp_path / "exp-2")
    assert f"resuming from step 2: {checkpoint_path(fresh.directory, 2)}" in lines


def test_auto_skips_a_start_that_never_saved(tmp_path: Path) -> None:
    first, _ = train(named(tmp_path, "exp"))
    failed = fail_before_the_first_save(named(tmp_path, "exp", resume="none"))
    assert failed == tmp_path / "exp-2"
    again, lines = train(named(tmp_path, "exp", 3))
    assert again.directory == first.directory
    assert f"skipping {failed / 'checkpoints'}: it has no complete checkpoint" in lines
    assert f"resuming from step 2: {checkpoint_path(first.directory, 2)}" in lines


def test_auto_says_that_it_starts_from_step_0(tmp_path: Path) -> None:
    _, lines = train(named(tmp_path, "exp", 1))
    assert f"no earlier run named exp in {tmp_path}" in lines
    shutil.rmtree(tmp_path / "exp" / "checkpoints")
    again, lines = train(named(tmp_path, "exp", 1))
    assert again.directory == tmp_path / "exp-2"
    assert lines[:2] == [
        f"skipping {tmp_path / 'exp' / 'checkpoints'}: it has no complete checkpoint",
        "checkpoint.resume=auto: starting from step 0",
    ]


@pytest.mark.parametrize("resume", ["auto", "{}/exp", "{}/exp/checkpoints"])
def test_damaged_checkpoints_are_not_a_reason_to_start_over(tmp_path: Path, resume: str) -> None:
    first, _ = train(named(tmp_path, "exp"))
    for step in (1, 2):
        shard = checkpoint_path(first.directory, step) / "rank_00000.safetensors"
        data = bytearray(shard.read_bytes())
        data[-5] ^= 1
        shard.write_bytes(data)
    before = contents(tmp_path)
    assert error_of(named(tmp_path, "exp", 4, resume=resume.format(tmp_path))) == (
        f"{first.directory / 'checkpoints'}: every complete checkpoint is damaged; "
        "nearest: checkpoint.resume=none, which starts from step 0"
    )
    assert contents(tmp_path) == before


def test_run_directory_as_a_source_continues_that_run(tmp_path: Path) -> None:
    first, _ = train(named(tmp_path, "exp"))
    branch, lines = train(named(tmp_path, "other", 3, resume=str(first.directory)))
    assert branch.directory == tmp_path / "other"
    assert list(losses(branch.directory)) == [3]
    again, lines = train(named(tmp_path, "exp", 3, resume=str(first.directory)))
    assert f"resuming from step 2: {checkpoint_path(first.directory, 2)}" in lines
    assert again.directory == first.directory
    assert list(losses(again.directory)) == [1, 2, 3]


def test_checkpoint_directory_outside_continues_the_run_that_saved_there(tmp_path: Path) -> None:
    """A later start of the same name must not get the records of the earlier one."""
    outside = str(tmp_path / "outside")
    first, _ = train(named(tmp_path, "exp", directory=outside))
    with Checkpoint(open_storage(tmp_path / "outside" / "step_00000002")) as checkpoint:
        assert checkpoint.manifest["run"] == json.loads((first.directory / "run.json").read_text())["id"]
    second = fail_before_the_first_save(named(tmp_path, "exp", resume="none", directory=str(tmp_path / "other")))
    before = contents(second)
    again, _ = train(named(tmp_path, "exp", 3, directory=outside))
    assert again.directory == first.directory
    assert list(losses(again.directory)) == [1, 2, 3]
    assert contents(second) == before


def not_owner(outside: Path, name: str, log_directory: Path) -> str:
    return (
        f"checkpoint.directory={outside}: it has the checkpoints of another run, {name} in {log_directory / name}; "
        f"nearest: another directory, or log.name={name} checkpoint.resume={outside}, which continues that run"
    )


@pytest.mark.parametrize("resume", ["auto", "none", "{}", "{}/step_00000002"])
def test_checkpoint_directory_of_another_run_is_refused(tmp_path: Path, resume: str) -> None:
    """Before anything is written; what the line recommends continues the run."""
    outside = tmp_path / "checkpoints"
    first, _ = train(named(tmp_path, "exp", directory=str(outside)))
    before = contents(tmp_path)
    other = named(tmp_path, "other", 3, directory=str(outside), resume=resume.format(outside), keep=1)
    assert error_of(other) == not_owner(outside, "exp", tmp_path)
    assert contents(tmp_path) == before
    assert not (tmp_path / "other").exists()
    again, _ = train(named(tmp_path, "exp", 3, directory=str(outside), resume=str(outside)))
    assert again.directory == first.directory
    branch, _ = train(named(tmp_path, "other", 4, directory=str(tmp_path / "new"), resume=str(outside)))
    assert list(losses(branch.directory)) == [4]


def test_checkpoint_directory_of_the_same_name_elsewhere_is_refused(tmp_path: Path) -> None:
    """Two users start the same recipe with one checkpoint.directory."""
    outside, mine, theirs = tmp_path / "checkpoints", tmp_path / "mine", tmp_path / "theirs"
    train(named(theirs, "exp", directory=str(outside)))
    before = contents(tmp_path)
    for resume in ("auto", "none"):
        config = named(mine, "exp", 3, directory=str(outside), resume=resume, keep=1)
        assert error_of(config) == not_owner(outside, "exp", theirs)
    assert contents(tmp_path) == before
    asked, _ = train(named(mine, "exp", 3, directory=str(outside), resume=str(outside)))
    assert list(losses(asked.directory)) == [3]
    assert read_identity(mine / "exp") == read_identity(theirs / "exp")  # the same run, in another place


def test_run_continues_although_its_directory_is_lost(tmp_path: Path) -> None:
    """Such as with the disk of a container: the same command continues, and the checkpoints are still its own."""
    outside = tmp_path / "checkpoints"
    first, _ = train(named(tmp_path, "exp", directory=str(outside)))
    identity = read_identity(first.directory)
    for steps in (3, 4):
        shutil.rmtree(first.directory)
        again, _ = train(named(tmp_path, "exp", steps, directory=str(outside), keep=2))
        assert (again.directory, read_identity(again.directory)) == (first.directory, identity)
        assert list(losses(again.directory)) == [steps]
    assert committed_steps(outside) == [4, 3]
    damaged = outside / "step_00000004" / "rank_00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    shutil.rmtree(again.directory)
    again, _ = train(named(tmp_path, "exp", 5, directory=str(outside)))
    assert list(losses(again.directory)) == [4, 5]
    shutil.rmtree(again.directory)
    other = named(tmp_path, "exp", 6, directory=str(outside)).model_dump(mode="json")
    other["train"]["seed"] = 5  # a job array with one name and one directory
    assert error_of(Config.model_validate(other)) == not_owner(outside, "exp", tmp_path)


def test_continued_run_does_not_take_the_checkpoints_of_another(tmp_path: Path) -> None:
    outside = tmp_path / "checkpoints"
    train(named(tmp_path, "exp", directory=str(outside)))
    mine = fail_before_the_first_save(named(tmp_path, "mine"))
    before = contents(tmp_path)
    for resume in ("none", str(mine)):
        with pytest.raises(
            UserError, match=r"it has the checkpoints of another run, exp in .*; nearest: another dir.*y$"
        ):
            Trainer(named(tmp_path, "mine", directory=str(outside), resume=resume), run_directory=mine)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("continued", [False, True])
def test_run_continues_with_another_checkpoint_directory(tmp_path: Path, continued: bool) -> None:
    """It finds the checkpoints where it saved last, and leaves them there."""
    path = tmp_path / "exp"
    places: list[Path | None] = [None, tmp_path / "one", tmp_path / "two"]
    for steps, place in enumerate(places, 2):
        directory = str(place) if place else None
        config = named(tmp_path, "exp", steps, directory=directory, keep=1)
        run, lines = train(config, run_directory=path if continued and path.exists() else None)
        assert steps == 2 or any(line.startswith(f"resuming from step {steps - 1}: ") for line in lines)
        assert list(losses(run.directory)) == list(range(1, steps + 1))
    assert run.directory == path
    assert [committed_steps(place or path / "checkpoints") for place in places] == [[2], [3], [4]]


def test_old_checkpoints_of_other_runs_are_kept(tmp_path: Path) -> None:
    """A run neither counts nor removes them, wherever they are."""
    other, _ = train(named(tmp_path, "other", 3))
    first, _ = train(named(tmp_path, "exp", 4, keep=0))
    for step in (1, 3):
        shutil.rmtree(checkpoint_path(first.directory, step))
        shutil.copytree(checkpoint_path(other.directory, step), checkpoint_path(first.directory, step))
    before = contents(checkpoint_path(first.directory, 3))
    shutil.copytree(checkpoint_path(other.directory, 1), checkpoint_path(first.directory, 7))
    again, lines = train(named(tmp_path, "exp", 6, keep=2))
    assert f"skipping {checkpoint_path(first.directory, 7)}: it belongs to another run" in lines
    assert f"resuming from step 4: {checkpoint_path(first.directory, 4)}" in lines
    assert committed_steps(again.directory / "checkpoints") == [7, 6, 5, 3, 1]
    assert contents(checkpoint_path(first.directory, 3)) == before


def test_checkpoint_directory_of_a_running_process_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "checkpoints"
    held = RunDirectory.create(tmp_path, "other")
    held.lock_checkpoints(outside)
    with pytest.raises(UserError) as error:
        train(named(tmp_path, "exp", directory=str(outside)))
    assert str(error.value) == (
        f"{outside}: another process is training in this directory; wait for it, or choose another checkpoint.directory"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "other"]  # no run directory is left
    held.close()
    first, _ = train(named(tmp_path, "exp", directory=str(outside)))
    held = RunDirectory.create(tmp_path, "another")
    held.lock_checkpoints(outside)
    before = contents(first.directory)
    with pytest.raises(UserError, match="another process is training"):
        train(named(tmp_path, "exp", 3, directory=str(outside)))
    assert contents(first.directory) == before  # that of a run that continues stays
    RunDirectory.open(first.directory, "exp").close()


def test_copied_run_directory_is_refused(tmp_path: Path) -> None:
    first, _ = train(named(tmp_path, "exp"))
    shutil.copytree(first.directory, tmp_path / "exp-2")
    assert error_of(named(tmp_path, "exp", 3)) == (
        f"{tmp_path / 'exp-2'} and {first.directory}: one is a copy of the other, their run.json is the same; "
        f"nearest: checkpoint.resume={first.directory}"
    )


def test_locked_directory_is_refused_and_released(tmp_path: Path) -> None:
    first, _ = train(named(tmp_path, "exp"))
    held = RunDirectory.open(first.directory, "exp")
    for resume in ("auto", str(first.directory)):
        assert error_of(named(tmp_path, "exp", 3, resume=resume)) == (
            f"{first.directory}: another process is training in this directory; wait for it, or choose another log.name"
        )
    held.close()
    with pytest.raises(UserError, match="another process"):
        train(named(tmp_path, "exp", 3), RunAtStep({3: lambda: RunDirectory.open(first.directory, "exp")}))
    RunDirectory.open(first.directory, "exp").close()  # the run has released it, although it failed


def test_second_process_is_refused_until_the_first_is_killed(cli: ForkServer, tmp_path: Path) -> None:
    arguments = [*SMOKE, f"log.directory={tmp_path}", "checkpoint.resume=auto", "checkpoint.every=2"]
    running = cli.start([*arguments, "train.steps=1000000", "checkpoint.keep=0"])
    directory, deadline = tmp_path / "tiny-llama-smoke", time.monotonic() + 60
    while not (directory / "checkpoints" / "step_00000002" / "complete.json").exists():
        assert running.poll() is None, running.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    refused = cli.run([*arguments, "train.steps=1000000"])
    assert refused.returncode == 2
    assert refused.stderr == (
        f"trainyard: {directory}: another process is training in this directory; wait for it, or choose another "
        "log.name\n"
    )
    running.send_signal(signal.SIGKILL)
    running.communicate()
    last = max(int(path.name[5:]) for path in (directory / "checkpoints").glob("step_*"))
    resumed = cli.run([*arguments, f"train.steps={last + 1}"])
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from step" in resumed.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama-smoke"]

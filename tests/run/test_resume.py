"""A run that is interrupted and resumed equals the uninterrupted run: the same losses, bit for bit, and one history."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.support import configs
from tests.support.logs import captured_log
from trainyard import Callback, Trainer
from trainyard.checkpoint import checkpoint as native_checkpoint
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.remote.storage import open_storage
from trainyard.run.callbacks import TrainerView
from trainyard.run.checkpointing import saver
from trainyard.run.records import RunSummary

STEPS = 5
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Idle threads spin, which costs more than it gains with matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def configure(tmp_path: Path, model: dict[str, Any] | str = "llama", **sections: dict[str, Any]) -> Config:
    base: dict[str, Any] = {
        "train": {"steps": STEPS},
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_steps": 2, "decay_steps": 10},
        "checkpoint": {"every": 1, "keep": 0, "export_hf": False},
        "log": {"directory": str(tmp_path)},
    }
    return configs.tiny_config(
        model, **{key: {**base.get(key, {}), **sections.get(key, {})} for key in {*base, *sections}}
    )


class RunAtStep(Callback):
    """Runs an action after a step and before its save starts, or when the step is logged."""

    def __init__(self, actions: dict[int, Callable[[], object]], logged: bool = False) -> None:
        self.actions, self.logged = actions, logged

    def on_step(self, trainer: TrainerView, step: int) -> None:
        if not self.logged:
            self.actions.get(step, lambda: None)()

    def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        if self.logged:
            self.actions.get(record["step"], lambda: None)()


def train(config: Config, *callbacks: Callback, **arguments: Any) -> tuple[RunSummary, list[str]]:
    """The summary of a run, and its log lines."""
    lines: list[str] = []
    with captured_log(lines.append):
        summary = Trainer(config, callbacks=callbacks, **arguments).run()
    assert all("\n" not in line for line in lines)
    return summary, lines


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory: Path) -> dict[int, float]:
    """Losses by step; every step must have exactly one record."""
    logged = [(record["step"], record["loss"]) for record in records(directory) if "loss" in record]
    assert len(dict(logged)) == len(logged)
    return dict(logged)


def committed_steps(directory: Path) -> list[int]:
    """Steps of committed checkpoints, latest first."""
    storage = open_storage(directory)
    return [step for step in native_checkpoint.list_steps(storage) if native_checkpoint.is_committed(storage, step)]


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / "checkpoints" / native_checkpoint.step_directory(step)


def error_of(config: Config) -> str:
    """The one-line error of a run that cannot start."""
    with pytest.raises(UserError) as error:
        Trainer(config)
    assert "\n" not in str(error.value)
    return str(error.value)


# Resuming.

CASES = [
    ("llama", {}, "fp32"),
    ("llama", {}, "bf16"),
    ("gpt", DROPOUT | {"embedding_dropout": 0.1}, "fp32"),
    ("gpt", DROPOUT, "bf16_sr"),
    ("bert", DROPOUT, "fp32"),
    ("bert", DROPOUT, "bf16"),
]


@pytest.mark.parametrize(("family", "dropout", "kind"), CASES)
def test_resumed_run_equals_the_uninterrupted_run(
    tmp_path: Path, family: str, dropout: dict[str, float], kind: str
) -> None:
    model, precision = {**configs.TINY_MODELS[family], **dropout}, {"kind": kind}
    full, _ = train(configure(tmp_path, model, precision=precision))
    expected = losses(full.directory)
    last = saved_files(checkpoint_path(full.directory, STEPS))
    for begin in (1, STEPS - 1):
        resume = {"resume": str(checkpoint_path(full.directory, begin))}
        again, lines = train(configure(tmp_path, model, precision=precision, checkpoint=resume))
        assert f"resuming from step {begin}: {resume['resume']}" in lines
        assert again.directory != full.directory
        assert losses(again.directory) == {number: expected[number] for number in range(begin + 1, STEPS + 1)}
        assert saved_files(checkpoint_path(again.directory, STEPS)) == last  # weights and moments too, to the last bit


def saved_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def test_auto_resumes_in_the_same_directory_or_starts(tmp_path: Path) -> None:
    auto = {"resume": "auto"}
    first, lines = train(configure(tmp_path, train={"steps": 2}, checkpoint=auto))
    assert not any("going on" in line for line in lines)
    again, lines = train(configure(tmp_path, checkpoint=auto))
    assert again.directory == first.directory == tmp_path / "run"
    assert f"resuming from step 2: {checkpoint_path(first.directory, 2)}" in lines
    full, _ = train(configure(tmp_path / "whole"))
    assert losses(again.directory) == losses(full.directory)
    assert again.first_loss == losses(full.directory)[3]
    fresh, _ = train(configure(tmp_path))  # resume=none starts a new run directory
    assert fresh.directory == tmp_path / "run-2"
    assert losses(fresh.directory) == losses(full.directory)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("run-")] == ["run-2"]


def test_time_of_the_first_step_after_resuming_is_that_of_one_step(tmp_path: Path) -> None:
    train(configure(tmp_path, train={"steps": STEPS - 1}, checkpoint={"resume": "auto"}))
    wait = RunAtStep({STEPS: lambda: time.sleep(0.2)})
    again, _ = train(configure(tmp_path, checkpoint={"resume": "auto"}), wait)
    (last,) = (record for record in records(again.directory) if record["step"] == STEPS and "loss" in record)
    assert 200 <= last["ms_per_iteration"] < 5000
    assert last["ranks"] == 1  # every start names its hardware


def test_resuming_an_older_step_drops_later_records(tmp_path: Path) -> None:
    sections = {"data": {"validation_fraction": 0.2}, "evaluate": {"every": 2, "batches": 1}}
    config = configure(tmp_path, checkpoint={"resume": "auto"}, **sections)
    first, _ = train(config)
    before = records(first.directory)
    for number in (3, 4, 5):
        shutil.rmtree(checkpoint_path(first.directory, number))
    with (first.directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # cut off by a kill
    train(config)
    after = records(first.directory)

    def summary_of(record: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in record.items() if key == "step" or "loss" in key or key == "checkpoint"}

    assert sorted(map(str, map(summary_of, after))) == sorted(map(str, map(summary_of, before)))
    assert list(losses(first.directory)) == [1, 2, 3, 4, 5]


def test_weights_only_starts_with_a_new_optimizer(tmp_path: Path) -> None:
    full, _ = train(configure(tmp_path))
    config = configure(tmp_path, checkpoint={"resume": str(checkpoint_path(full.directory, 3)), "weights_only": True})
    trainer = Trainer(config)
    with native_checkpoint.Checkpoint(open_storage(checkpoint_path(full.directory, 3))) as checkpoint:
        for name in trainer.blueprint.parameter_names():
            begin = 0
            for piece in trainer.blueprint.local_slices(name):
                mine = trainer.full_parameter(name)[begin : (begin := begin + piece.sizes[0])]
                assert torch.equal(mine, checkpoint.read(piece))
    assert trainer.completed_steps == 0
    assert int(trainer.optimizer.guard.update_count) == 0
    assert not trainer.optimizer.state.exp_avg.any()
    assert not trainer.optimizer.state.exp_avg_sq.any()
    summary = trainer.run()
    assert list(losses(summary.directory)) == [1, 2, 3, 4, 5]
    assert summary.directory == tmp_path / "run-2"
    nothing = {"resume": str(tmp_path / "nothing"), "weights_only": True}
    assert str(tmp_path / "nothing") in error_of(configure(tmp_path, checkpoint=nothing))


def noisy_loss(output: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """A loss with noise from every random generator that user code may draw from."""
    noise = torch.rand(()) + random.random() + np.random.rand()
    labels = batch["labels"].long()
    loss = F.cross_entropy(output.logits().flatten(0, -2).float(), labels.flatten(), reduction="sum")
    return loss * (1 + 0.1 * noise), labels.numel()


def test_random_generators_of_user_code_are_restored(tmp_path: Path) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    full, _ = train(configure(tmp_path), loss=noisy_loss)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(4)
    resume = {"resume": str(checkpoint_path(full.directory, 2))}
    again, _ = train(configure(tmp_path, checkpoint=resume), loss=noisy_loss)
    expected = losses(full.directory)
    assert losses(again.directory) == {number: expected[number] for number in (3, 4, 5)}
    plain, _ = train(configure(tmp_path), loss=noisy_loss)
    assert losses(plain.directory) != expected  # the noise matters


def test_skip_counts_are_restored(tmp_path: Path) -> None:
    calls = 0

    def sometimes(output: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        nonlocal calls
        calls += 1
        labels = batch["labels"].long()
        loss = F.cross_entropy(output.logits().flatten(0, -2).float(), labels.flatten(), reduction="sum")
        return loss * (float("nan") if calls in (3, 8) else 1), labels.numel()  # of steps 2 and 4

    full, _ = train(configure(tmp_path), loss=sometimes)
    assert full.skipped_steps == 2
    calls = 6
    again, _ = train(
        configure(tmp_path, checkpoint={"resume": str(checkpoint_path(full.directory, 3))}), loss=sometimes
    )
    assert again.skipped_steps == 2
    assert [record["skipped"] for record in records(again.directory) if "loss" in record] == [2, 2]
    assert saved_files(checkpoint_path(again.directory, STEPS)) == saved_files(checkpoint_path(full.directory, STEPS))


# When checkpoints are written, and which are kept.


@pytest.mark.parametrize(
    ("every", "keep", "left"), [(2, 0, [5, 4, 2]), (2, 1, [5]), (1, 2, [5, 4]), (9, 3, [5]), (5, 3, [5])]
)
def test_every_and_keep(tmp_path: Path, every: int, keep: int, left: list[int]) -> None:
    summary, _ = train(configure(tmp_path, checkpoint={"every": every, "keep": keep}))
    assert committed_steps(summary.directory / "checkpoints") == left
    assert sorted(os.listdir(summary.directory / "checkpoints")) == [
        native_checkpoint.step_directory(each) for each in left[::-1]
    ]
    told = [record["step"] for record in records(summary.directory) if "checkpoint" in record]
    assert told == sorted({*range(every, STEPS + 1, every), STEPS})


def test_nothing_is_saved_by_default(tmp_path: Path) -> None:
    summary, _ = train(configure(tmp_path, checkpoint={"every": 0}))
    assert not (summary.directory / "checkpoints").exists()


def test_every_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that advances 40 s per step, every_minutes=1 has passed after two steps."""

    class Clock(Callback):
        now = time.monotonic()

        def monotonic(self) -> float:
            return self.now

        def on_step(self, trainer: TrainerView, number: int) -> None:
            self.now += 40

    clock = Clock()
    monkeypatch.setattr(saver, "time", clock)
    summary, _ = train(configure(tmp_path, train={"steps": 8}, checkpoint={"every": 0, "every_minutes": 1}), clock)
    assert committed_steps(summary.directory / "checkpoints") == [8, 6, 3]


@pytest.mark.parametrize("logged", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_the_step_in_progress(tmp_path: Path, number: int, logged: bool) -> None:
    stopped, _ = train(
        configure(tmp_path, checkpoint={"every": 100, "resume": "auto"}),
        RunAtStep({3: lambda: os.kill(os.getpid(), number)}, logged),
    )
    assert stopped.interrupted
    assert stopped.steps == 3
    assert committed_steps(stopped.directory / "checkpoints") == [3]
    again, lines = train(configure(tmp_path, checkpoint={"every": 100, "resume": "auto"}))
    assert f"resuming from step 3: {checkpoint_path(stopped.directory, 3)}" in lines
    full, _ = train(configure(tmp_path / "whole"))
    assert losses(again.directory) == losses(full.directory)


def test_blocking_and_background_saves_write_the_same_files(tmp_path: Path) -> None:
    """Training changes the weights while a background save is writing; the host copy must not change."""
    found = []
    for blocking in (True, False):
        summary, _ = train(configure(tmp_path, checkpoint={"blocking": blocking}))
        found.append([saved_files(checkpoint_path(summary.directory, number)) for number in range(1, STEPS + 1)])
        body = native_checkpoint.Checkpoint(open_storage(checkpoint_path(summary.directory, STEPS))).manifest
        assert body["step"] == STEPS
        assert body["consumed_samples"] == STEPS * 4
    assert found[0] == found[1]
    assert len({files["rank_00000.safetensors"] for files in found[0]}) == STEPS


def test_resuming_a_completed_run_changes_no_file(tmp_path: Path) -> None:
    config = configure(tmp_path, checkpoint={"resume": "auto", "export_hf": True})
    first, _ = train(config)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = files()
    again, lines = train(config)
    assert f"resuming from step {STEPS}: {checkpoint_path(first.directory, STEPS)}" in lines
    assert (again.directory, again.steps, again.interrupted) == (first.directory, STEPS, False)
    assert files() == before


# Incompatible checkpoints give a one-line error.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of step 3 of a run of 5."""
    summary, _ = train(configure(tmp_path_factory.mktemp("saved")))
    return checkpoint_path(summary.directory, 3)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({**configs.LLAMA, "hidden": 64}, "model.hidden=64: the checkpoint {} has 32"),
        ({**configs.LLAMA, "layers": 3}, "model.layers=3: the checkpoint {} has 2"),
        (configs.GPT, "model.family=gpt: the checkpoint {} has llama"),
        (
            {**configs.LLAMA, "rope_theta": 5.0},
            "model.rope_theta=5.0: the checkpoint {} has 10000.0; nearest: 10000.0, or checkpoint.weights_only=true",
        ),
    ],
)
def test_other_model_is_refused(tmp_path: Path, saved: Path, model: dict[str, Any], line: str) -> None:
    assert error_of(configure(tmp_path, model, checkpoint={"resume": str(saved)})) == line.format(saved)


def test_other_global_batch_is_refused(tmp_path: Path, saved: Path) -> None:
    config = configure(tmp_path, train={"global_batch": 8}, checkpoint={"resume": str(saved)})
    near = "nearest: 4, or checkpoint.weights_only=true"
    assert error_of(config) == f"train.global_batch=8: the checkpoint counts samples in batches of 4; {near}"


def test_fewer_steps_than_completed_are_refused(tmp_path: Path, saved: Path) -> None:
    config = configure(tmp_path, train={"steps": 2}, checkpoint={"resume": str(saved)})
    assert error_of(config) == "train.steps=2: the checkpoint is already at step 3"


def test_no_checkpoint(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "nothing", "memory://nothing"):
        line = error_of(configure(tmp_path, checkpoint={"resume": str(where)}))
        assert line == f"checkpoint.resume={where}: no valid checkpoint; nearest: auto, or none"


def test_all_checkpoints_are_invalid(tmp_path: Path, saved: Path) -> None:
    for step in (1, 2):
        shutil.copytree(saved, tmp_path / native_checkpoint.step_directory(step))
    (tmp_path / "step_00000001" / "complete.json").unlink()
    (tmp_path / "step_00000002" / "rank_00000.safetensors").unlink()
    lines: list[str] = []
    no_checkpoint = (
        r": every complete checkpoint is damaged; nearest: checkpoint\.resume=none, which starts from step 0$"
    )
    with pytest.raises(UserError, match=no_checkpoint), captured_log(lines.append):
        Trainer(configure(tmp_path, checkpoint={"resume": str(tmp_path)}))
    assert [line.split(":")[0].rsplit("/", 1)[-1] for line in lines] == ["rank_00000.safetensors", "step_00000001"]


def test_other_differences_are_logged(tmp_path: Path, saved: Path) -> None:
    sections: dict[str, Any] = {
        "optimizer": {"lr": 1e-3},
        "data": {"seq_len": 32},
        "precision": {"kind": "bf16"},
        "train": {"seed": 5, "micro_batch": 4, "steps": 6},
    }
    summary, lines = train(configure(tmp_path, checkpoint={"resume": str(saved)}, **sections))
    assert [line for line in lines if line.startswith("note:")] == [
        "note: data.seq_len was 16 when the checkpoint was written, and is 32",
        "note: train.steps was 5 when the checkpoint was written, and is 6",
        "note: train.seed was 1234 when the checkpoint was written, and is 5",
        "note: optimizer.lr was 0.01 when the checkpoint was written, and is 0.001",
        "note: precision.kind was fp32 when the checkpoint was written, and is bf16",
        "note: the learning rate was 9.619e-03 at step 3, and is 8.536e-04 at step 4; without these changes, 8.536e-03",
    ]
    assert list(losses(summary.directory)) == [4, 5, 6]


@pytest.mark.parametrize(("decay_steps", "jumps"), [(None, True), (10, False)])
def test_more_steps_say_what_the_schedule_does(tmp_path: Path, decay_steps: int | None, jumps: bool) -> None:
    """Unless schedule.decay_steps is set, the length of the run stretches the schedule, and the learning rate jumps."""
    schedule = {"decay_steps": decay_steps}
    first, _ = train(configure(tmp_path, schedule=schedule, train={"steps": 4}, checkpoint={"resume": "auto"}))
    again, lines = train(configure(tmp_path, schedule=schedule, train={"steps": 8}, checkpoint={"resume": "auto"}))
    assert again.directory == first.directory
    rates = {record["step"]: record["lr"] for record in records(again.directory) if "lr" in record}
    expected = ["note: train.steps was 4 when the checkpoint was written, and is 8"]
    if jumps:
        expected += [
            f"note: the learning rate was {rates[4]:.3e} at step 4, and is {rates[5]:.3e} at step 5; "
            "without these changes, 0.000e+00"
        ]
        assert rates[5] > rates[4]
    assert [line for line in lines if line.startswith("note:")] == expected


def test_fused_matrices_resume_unfused(tmp_path: Path, saved: Path) -> None:
    apart = {**configs.LLAMA, "fuse_qkv": False, "fuse_gate_up": False}
    plain, _ = train(configure(tmp_path, checkpoint={"resume": str(saved)}))
    other, lines = train(configure(tmp_path, apart, checkpoint={"resume": str(saved)}))
    assert not any(line.startswith("note:") for line in lines)
    assert losses(other.directory) == pytest.approx(losses(plain.directory), rel=1e-5)


def test_muon_checkpoint_resumes_with_muon_only(tmp_path: Path) -> None:
    """Muon keeps no second moment of matrices, which AdamW would need."""
    muon = {"kind": "muon"}
    full, _ = train(configure(tmp_path, optimizer=muon))
    resume = {"resume": str(checkpoint_path(full.directory, 3))}
    again, _ = train(configure(tmp_path, optimizer=muon, checkpoint=resume))
    expected = losses(full.directory)
    assert losses(again.directory) == {step: expected[step] for step in (4, 5)}
    assert error_of(configure(tmp_path, checkpoint=resume)) == (
        "optimizer.kind=adamw: the checkpoint has no second moment for the matrices that muon has updated; "
        "nearest: muon, or checkpoint.weights_only=true"
    )

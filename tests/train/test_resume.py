"""A run that is stopped and goes on is the one that was never stopped: the same losses, bit for bit, one history."""

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
from trainyard.checkpoint.io.storage import open_storage
from trainyard.checkpoint.native import checkpoint as native_checkpoint
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.train.callbacks import TrainerView
from trainyard.train.checkpointing import saver
from trainyard.train.trainer import RunSummary

STEPS = 5
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait spin: with matrices this small they cost more than they bring."""
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


class At(Callback):
    """Does something after a step, before its checkpoint is begun, or when it is logged."""

    def __init__(self, actions: dict[int, Callable[[], object]], logged: bool = False) -> None:
        self.actions, self.logged = actions, logged

    def on_step(self, trainer: TrainerView, step: int) -> None:
        if not self.logged:
            self.actions.get(step, lambda: None)()

    def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        if self.logged:
            self.actions.get(record["step"], lambda: None)()


def train(config: Config, *hooks: Callback, **arguments: Any) -> tuple[RunSummary, list[str]]:
    """How a run ended, and what it said."""
    said: list[str] = []
    with captured_log(said.append):
        summary = Trainer(config, callbacks=hooks, **arguments).run()
    assert all("\n" not in line for line in said)
    return summary, said


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory: Path) -> dict[int, float]:
    """By step, each of which must be there once."""
    found = [(record["step"], record["loss"]) for record in records(directory) if "loss" in record]
    assert len(dict(found)) == len(found)
    return dict(found)


def complete(where: Path) -> list[int]:
    place = open_storage(where)
    return [step for step in native_checkpoint.list_steps(place) if native_checkpoint.is_committed(place, step)]


def step(directory: Path, number: int) -> Path:
    return directory / "checkpoints" / native_checkpoint.step_directory(number)


def refused(config: Config) -> str:
    """The one line that a run ends with before it begins."""
    with pytest.raises(UserError) as told:
        Trainer(config)
    assert "\n" not in str(told.value)
    return str(told.value)


# Going on.

CASES = [
    ("llama", {}, "fp32"),
    ("llama", {}, "bf16"),
    ("gpt", DROPOUT | {"embedding_dropout": 0.1}, "fp32"),
    ("gpt", DROPOUT, "bf16_sr"),
    ("bert", DROPOUT, "fp32"),
    ("bert", DROPOUT, "bf16"),
]


@pytest.mark.parametrize(("family", "dropout", "kind"), CASES)
def test_from_any_step_it_is_the_run_that_was_never_stopped(
    tmp_path: Path, family: str, dropout: dict[str, float], kind: str
) -> None:
    model, precision = {**configs.TINY_MODELS[family], **dropout}, {"kind": kind}
    whole, _ = train(configure(tmp_path, model, precision=precision))
    expected = losses(whole.directory)
    last = saved_files(step(whole.directory, STEPS))
    for begin in (1, STEPS - 1):
        resume = {"resume": str(step(whole.directory, begin))}
        again, said = train(configure(tmp_path, model, precision=precision, checkpoint=resume))
        assert f"resuming from step {begin}: {resume['resume']}" in said
        assert again.directory != whole.directory
        assert losses(again.directory) == {number: expected[number] for number in range(begin + 1, STEPS + 1)}
        assert saved_files(step(again.directory, STEPS)) == last  # weights and moments too, to the last bit


def saved_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def test_auto_goes_on_in_the_same_directory_or_begins(tmp_path: Path) -> None:
    auto = {"resume": "auto"}
    first, said = train(configure(tmp_path, train={"steps": 2}, checkpoint=auto))
    assert not any("going on" in line for line in said)
    again, said = train(configure(tmp_path, checkpoint=auto))
    assert again.directory == first.directory == tmp_path / "run"
    assert f"resuming from step 2: {step(first.directory, 2)}" in said
    whole, _ = train(configure(tmp_path / "whole"))
    assert losses(again.directory) == losses(whole.directory)
    assert again.first_loss == losses(whole.directory)[3]
    fresh, _ = train(configure(tmp_path))  # resume=none: begins, beside it
    assert fresh.directory == tmp_path / "run-2"
    assert losses(fresh.directory) == losses(whole.directory)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("run-")] == ["run-2"]


def test_an_older_step_drops_what_was_written_of_later_ones(tmp_path: Path) -> None:
    sections = {"data": {"validation_fraction": 0.2}, "evaluate": {"every": 2, "batches": 1}}
    config = configure(tmp_path, checkpoint={"resume": "auto"}, **sections)
    first, _ = train(config)
    before = records(first.directory)
    for number in (3, 4, 5):
        shutil.rmtree(step(first.directory, number))
    with (first.directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # a kill came here
    train(config)
    after = records(first.directory)

    def told(record: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in record.items() if key == "step" or "loss" in key or key == "checkpoint"}

    assert sorted(map(str, map(told, after))) == sorted(map(str, map(told, before)))
    assert list(losses(first.directory)) == [1, 2, 3, 4, 5]


def test_weights_only_begins_with_a_fresh_optimizer(tmp_path: Path) -> None:
    whole, _ = train(configure(tmp_path))
    config = configure(tmp_path, checkpoint={"resume": str(step(whole.directory, 3)), "weights_only": True})
    trainer = Trainer(config)
    with native_checkpoint.Checkpoint(open_storage(step(whole.directory, 3))) as checkpoint:
        for name in trainer.blueprint.parameter_names():
            begin = 0
            for piece in trainer.blueprint.tp_slices(name):
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
    assert str(tmp_path / "nothing") in refused(configure(tmp_path, checkpoint=nothing))


def own_random(output: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """A loss with noise from every generator a user may draw from."""
    noise = torch.rand(()) + random.random() + np.random.rand()
    labels = batch["labels"].long()
    loss = F.cross_entropy(output.logits().flatten(0, -2).float(), labels.flatten(), reduction="sum")
    return loss * (1 + 0.1 * noise), labels.numel()


def test_random_numbers_of_the_user_s_own_code_go_on(tmp_path: Path) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    whole, _ = train(configure(tmp_path), loss=own_random)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(4)
    resume = {"resume": str(step(whole.directory, 2))}
    again, _ = train(configure(tmp_path, checkpoint=resume), loss=own_random)
    expected = losses(whole.directory)
    assert losses(again.directory) == {number: expected[number] for number in (3, 4, 5)}
    plain, _ = train(configure(tmp_path), loss=own_random)
    assert losses(plain.directory) != expected  # the noise is there


def test_skipped_steps_are_counted_on(tmp_path: Path) -> None:
    calls = 0

    def sometimes(output: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        nonlocal calls
        calls += 1
        labels = batch["labels"].long()
        loss = F.cross_entropy(output.logits().flatten(0, -2).float(), labels.flatten(), reduction="sum")
        return loss * (float("nan") if calls in (3, 8) else 1), labels.numel()  # of steps 2 and 4

    whole, _ = train(configure(tmp_path), loss=sometimes)
    assert whole.skipped_steps == 2
    calls = 6
    again, _ = train(configure(tmp_path, checkpoint={"resume": str(step(whole.directory, 3))}), loss=sometimes)
    assert again.skipped_steps == 2
    assert [record["skipped"] for record in records(again.directory) if "loss" in record] == [2, 2]
    assert saved_files(step(again.directory, STEPS)) == saved_files(step(whole.directory, STEPS))


# When checkpoints are written, and which stay.


@pytest.mark.parametrize(
    ("every", "keep", "left"), [(2, 0, [5, 4, 2]), (2, 1, [5]), (1, 2, [5, 4]), (9, 3, [5]), (5, 3, [5])]
)
def test_every_and_keep(tmp_path: Path, every: int, keep: int, left: list[int]) -> None:
    summary, _ = train(configure(tmp_path, checkpoint={"every": every, "keep": keep}))
    assert complete(summary.directory / "checkpoints") == left
    assert sorted(os.listdir(summary.directory / "checkpoints")) == [
        native_checkpoint.step_directory(each) for each in left[::-1]
    ]
    told = [record["step"] for record in records(summary.directory) if "checkpoint" in record]
    assert told == sorted({*range(every, STEPS + 1, every), STEPS})


def test_nothing_is_saved_unless_asked_for(tmp_path: Path) -> None:
    summary, _ = train(configure(tmp_path, checkpoint={"every": 0}))
    assert not (summary.directory / "checkpoints").exists()


def test_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes 40 seconds ahead in every step; minutes=1 is over after two of them."""

    class Clock(Callback):
        now = time.monotonic()

        def monotonic(self) -> float:
            return self.now

        def on_step(self, trainer: TrainerView, number: int) -> None:
            self.now += 40

    clock = Clock()
    monkeypatch.setattr(saver, "time", clock)
    summary, _ = train(configure(tmp_path, train={"steps": 8}, checkpoint={"every": 0, "every_minutes": 1}), clock)
    assert complete(summary.directory / "checkpoints") == [8, 6, 3]


@pytest.mark.parametrize("logged", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_it_came_in(tmp_path: Path, number: int, logged: bool) -> None:
    stopped, _ = train(
        configure(tmp_path, checkpoint={"every": 100, "resume": "auto"}),
        At({3: lambda: os.kill(os.getpid(), number)}, logged),
    )
    assert stopped.interrupted
    assert stopped.steps == 3
    assert complete(stopped.directory / "checkpoints") == [3]
    again, said = train(configure(tmp_path, checkpoint={"every": 100, "resume": "auto"}))
    assert f"resuming from step 3: {step(stopped.directory, 3)}" in said
    whole, _ = train(configure(tmp_path / "whole"))
    assert losses(again.directory) == losses(whole.directory)


def test_waiting_or_not_gives_the_same_files(tmp_path: Path) -> None:
    """While one is written the steps go on and change the weights: the copy must not."""
    found = []
    for blocking in (True, False):
        summary, _ = train(configure(tmp_path, checkpoint={"blocking": blocking}))
        found.append([saved_files(step(summary.directory, number)) for number in range(1, STEPS + 1)])
        body = native_checkpoint.Checkpoint(open_storage(step(summary.directory, STEPS))).manifest
        assert body["step"] == STEPS
        assert body["consumed_samples"] == STEPS * 4
    assert found[0] == found[1]
    assert len({files["rank_00000.safetensors"] for files in found[0]}) == STEPS


def test_a_finished_run_goes_on_to_nothing(tmp_path: Path) -> None:
    config = configure(tmp_path, checkpoint={"resume": "auto", "export_hf": True})
    first, _ = train(config)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = files()
    again, said = train(config)
    assert f"resuming from step {STEPS}: {step(first.directory, STEPS)}" in said
    assert (again.directory, again.steps, again.interrupted) == (first.directory, STEPS, False)
    assert files() == before


# What does not fit is one line.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of step 3 of a run of 5."""
    summary, _ = train(configure(tmp_path_factory.mktemp("saved")))
    return step(summary.directory, 3)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({**configs.LLAMA, "hidden": 64}, "model.hidden=64: the checkpoint {} has 32"),
        ({**configs.LLAMA, "layers": 3}, "model.layers=3: the checkpoint {} has 2"),
        (configs.GPT, "model.family=gpt: the checkpoint {} has llama"),
        ({**configs.LLAMA, "rope_theta": 5.0}, "model.rope_theta=5.0: the checkpoint {} has 10000.0"),
    ],
)
def test_another_model(tmp_path: Path, saved: Path, model: dict[str, Any], line: str) -> None:
    assert refused(configure(tmp_path, model, checkpoint={"resume": str(saved)})) == line.format(saved)


def test_another_global_batch(tmp_path: Path, saved: Path) -> None:
    config = configure(tmp_path, train={"global_batch": 8}, checkpoint={"resume": str(saved)})
    near = "nearest: 4, or checkpoint.weights_only=true"
    assert refused(config) == f"train.global_batch=8: the checkpoint counts samples in batches of 4; {near}"


def test_fewer_steps_than_were_made(tmp_path: Path, saved: Path) -> None:
    config = configure(tmp_path, train={"steps": 2}, checkpoint={"resume": str(saved)})
    assert refused(config) == "train.steps=2: the checkpoint is already at step 3"


def test_nothing_there(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "nothing", "memory://nothing"):
        line = refused(configure(tmp_path, checkpoint={"resume": str(where)}))
        assert line == f"checkpoint.resume={where}: no valid checkpoint; nearest: auto, or none"


def test_all_that_is_there_is_broken(tmp_path: Path, saved: Path) -> None:
    for number in (1, 2):
        shutil.copytree(saved, tmp_path / native_checkpoint.step_directory(number))
    (tmp_path / "step_00000001" / "complete.json").unlink()
    (tmp_path / "step_00000002" / "rank_00000.safetensors").unlink()
    said: list[str] = []
    no_checkpoint = r"^checkpoint.resume=.*: no valid checkpoint; nearest: auto, or none$"
    with pytest.raises(UserError, match=no_checkpoint), captured_log(said.append):
        Trainer(configure(tmp_path, checkpoint={"resume": str(tmp_path)}))
    assert [line.split(":")[0].rsplit("/", 1)[-1] for line in said] == ["rank_00000.safetensors", "step_00000001"]


def test_other_differences_are_noted_and_the_run_goes_on(tmp_path: Path, saved: Path) -> None:
    sections: dict[str, Any] = {
        "optimizer": {"lr": 1e-3},
        "data": {"seq_len": 32},
        "precision": {"kind": "bf16"},
        "train": {"seed": 5, "micro_batch": 4, "steps": 6},
    }
    summary, said = train(configure(tmp_path, checkpoint={"resume": str(saved)}, **sections))
    assert [line for line in said if line.startswith("note:")] == [
        "note: data.seq_len was 16 when the checkpoint was written, and is 32",
        "note: train.seed was 1234 when the checkpoint was written, and is 5",
        "note: optimizer.lr was 0.01 when the checkpoint was written, and is 0.001",
        "note: precision.kind was fp32 when the checkpoint was written, and is bf16",
    ]
    assert list(losses(summary.directory)) == [4, 5, 6]


def test_how_matrices_are_fused_does_not_matter(tmp_path: Path, saved: Path) -> None:
    apart = {**configs.LLAMA, "fuse_qkv": False, "fuse_gate_up": False}
    plain, _ = train(configure(tmp_path, checkpoint={"resume": str(saved)}))
    other, said = train(configure(tmp_path, apart, checkpoint={"resume": str(saved)}))
    assert not any(line.startswith("note:") for line in said)
    assert losses(other.directory) == pytest.approx(losses(plain.directory), rel=1e-5)

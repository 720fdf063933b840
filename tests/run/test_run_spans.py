"""Spans and profiles of runs: every part of a run is recorded, and no number of the run changes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.configs import tiny_config
from tests.support.forkserver import ForkServer
from tests.support.span_files import read_step_times
from trainyard.core.errors import UserError
from trainyard.metrics.span_window import mean_parts, read_window
from trainyard.metrics.spans import read_spans, span_path
from trainyard.run.callbacks import Callback, TrainerView
from trainyard.run.trainer import Trainer


def run(tmp_path: Path, name: str, **sections: dict[str, Any]) -> tuple[Path, list[tuple[float, float]]]:
    log = {"directory": str(tmp_path), "name": name, **sections.pop("log", {})}
    summary = Trainer(tiny_config(**{"train": {"steps": 6}, **sections}, log=log)).run()
    lines = (summary.directory / "metrics.jsonl").read_text().splitlines()
    return summary.directory, [(line["loss"], line["grad_norm"]) for line in map(json.loads, lines) if "loss" in line]


def test_spans_and_profiles_change_no_number(tmp_path: Path) -> None:
    quiet, expected = run(tmp_path, "quiet", log={"spans": False})
    assert not (quiet / "spans").exists()
    assert not (quiet / "profile").exists()
    recorded, numbers = run(tmp_path, "recorded")
    assert numbers == expected
    assert not (recorded / "profile").exists()
    profiled, numbers = run(tmp_path, "profiled", profile={"steps": [3, 4]})
    assert numbers == expected
    (trace,) = (profiled / "profile").iterdir()  # nothing half-written is left either
    assert trace.name == "rank-00000-steps-3-4.trace.json.gz"


def test_all_parts_of_a_run_are_recorded(tmp_path: Path) -> None:
    directory, _ = run(
        tmp_path,
        "run",
        evaluate={"every": 3},
        data={"validation_fraction": 2e-6},
        samples={"every": 3, "max_new_tokens": 2, "prompts": ["a"], "tokenizer": "bytes"},
        checkpoint={"every": 2},
    )
    spans = read_spans(span_path(directory, 0), 0)
    assert spans
    assert [step for step, _ in read_step_times(directory)[0]] == [1, 2, 3, 4, 5, 6]
    assert spans.named("step")["depth"].tolist() == [0] * 6
    assert spans.named("data wait")["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert spans.named("backward")["step"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert set(spans.named("optimizer")["depth"].tolist()) == {1}
    assert spans.named("evaluate")["step"].tolist() == [3, 6]
    assert spans.named("samples")["step"].tolist() == [3, 6]
    assert spans.named("save")["step"].tolist() == [2, 4, 6, 6]  # the last is the end of the run
    step, parts = mean_parts(read_window(directory, None, None))
    assert 0 < sum(parts.values()) <= step


def test_a_run_continues_without_its_span_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = {"every": 2, "resume": "auto"}
    _, expected = run(tmp_path / "whole", "run")
    directory, first = run(tmp_path, "run", train={"steps": 2}, schedule={"decay_steps": 6}, checkpoint=checkpoint)
    for path in (directory / "spans").iterdir():
        path.unlink()
    (directory / "spans").rmdir()
    (directory / "spans").write_text("in the way")
    config = tiny_config(
        train={"steps": 6}, checkpoint={"resume": "auto"}, log={"directory": str(tmp_path), "name": "run"}
    )
    summary = Trainer(config, run_directory=directory).run()
    assert summary.steps == 6
    assert summary.last_loss == expected[-1][0]
    assert [record.levelname for record in caplog.records if "spans" in record.getMessage()] == ["WARNING"]
    assert len(first) == 2


def test_a_resumed_run_profiles_what_is_left(tmp_path: Path) -> None:
    checkpoint = {"every": 2, "resume": "auto"}
    run(tmp_path, "run", train={"steps": 4}, checkpoint=checkpoint, profile={"steps": [1, 2]})
    run(tmp_path, "run", checkpoint=checkpoint, profile={"steps": [3, 5]})
    directory, _ = run(tmp_path, "run", train={"steps": 8}, checkpoint=checkpoint, profile={"steps": [3, 5]})
    names = [f"rank-00000-steps-{steps}.trace.json.gz" for steps in ("1-2", "5-5")]
    assert sorted(path.name for path in (directory / "profile").iterdir()) == names


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Block(Callback):
        """Puts a file where the directory of profiles belongs."""

        def on_start(self, trainer: TrainerView) -> None:
            assert trainer.directory
            (trainer.directory / "profile").write_text("")

    config = tiny_config(profile={"steps": [2, 2]}, log={"directory": str(tmp_path)})
    assert Trainer(config, callbacks=[Block()]).run().steps == 4
    assert "profile of steps 2 to 2 not written" in caplog.text


def test_a_rank_that_does_not_exist_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"profile.ranks=\[0, 3\]: the last rank of the run is 0; nearest: \[0\]"):
        Trainer(tiny_config(profile={"steps": [1, 2], "ranks": [0, 3]}, log={"directory": str(tmp_path)}))


PIPELINE = [
    *("train", "tiny-llama", "--smoke", "checkpoint.export_hf=false", "log.loggers=[]", "evaluate.every=0"),
    *("train.global_batch=4", "train.micro_batch=1", "log.name=run", "--nproc", "2", "layout.pp=2", "model.layers=4"),
]


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", [["layout.vpp=1"], ["layout.vpp=2"], ["layout.pipeline_schedule=zbv"]])
def test_a_pipeline_records_its_micro_batches(cli: ForkServer, tmp_path: Path, schedule: list[str]) -> None:
    vpp = 1 if schedule == ["layout.vpp=1"] else 2
    more = ["layout.vpp=2"] if "zbv" in schedule[0] else []
    done = cli.run([*PIPELINE, *schedule, *more], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for window in read_window(tmp_path / "runs/run", (2, 8), None):
        for name in ("forward", "backward"):
            (depth,) = set(window.depth[window.is_named(name)].tolist())
            assert depth == 2
            assert window.is_named(name).sum() == 7 * 4 * vpp
        inside = sum(window.milliseconds_by_step(name)[3] for name in ("forward", "backward"))
        assert inside <= window.milliseconds_by_step("pipeline")[3]


@pytest.mark.nightly
def test_compilation_is_recorded(tmp_path: Path) -> None:
    torch.compiler.reset()  # the same blocks may be compiled by an earlier test
    directory, _ = run(tmp_path, "run", compile={"enabled": True})
    spans = read_spans(span_path(directory, 0), 0)
    assert spans
    compiled = spans.named("compile")
    assert len(compiled)
    assert set(compiled["step"].tolist()) == {1}
    assert compiled["duration"].max() > 10**7
    assert compiled["depth"].min() >= 1

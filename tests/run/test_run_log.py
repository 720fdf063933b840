"""events.jsonl: starts, ends, loss spikes and skipped steps of a run, with the samples that caused them."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import configs
from trainyard import Callback, Trainer
from trainyard.config.schema import Config
from trainyard.core.errors import RunStopped
from trainyard.run.callbacks import TrainerView
from trainyard.run.loss_spikes import WARMUP_STEPS, LossSpikeDetector
from trainyard.train.cross_entropy import chunked_cross_entropy

SPIKE, SKIP = 57, 61


def configure(tmp_path: Path, **sections: dict[str, Any]) -> Config:
    return configs.tiny_config(**{"log": {"directory": str(tmp_path)}, **sections})


def events_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def kinds(directory: Path) -> list[tuple[str, int]]:
    return [(event["event"], event["step"]) for event in events_of(directory)]


class DisturbedSteps(Callback):
    """A loss that is high at step SPIKE and NaN at step SKIP. Also records the tokens of each step, and events."""

    def __init__(self) -> None:
        self.step = 1
        self.tokens: dict[int, list[torch.Tensor]] = {}
        self.events: list[dict[str, Any]] = []

    def on_start(self, trainer: TrainerView) -> None:
        self.step = trainer.completed_steps + 1

    def on_step(self, trainer: TrainerView, step: int) -> None:
        self.step = step + 1

    def on_event(self, trainer: TrainerView, event: dict[str, Any]) -> None:
        self.events.append(event)

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.tokens.setdefault(self.step, []).append(batch["tokens"].clone())
        factor = {SPIKE: 3.0, SKIP: float("nan")}.get(self.step, 1.0)
        return chunked_cross_entropy(output, batch["labels"]) * factor, (batch["labels"] != -100).sum()


def test_spikes_and_skipped_steps_between_logged_ones_have_events_with_their_samples(tmp_path: Path) -> None:
    disturbed = DisturbedSteps()
    config = configure(tmp_path, train={"steps": 64}, log={"directory": str(tmp_path), "every": 50})
    trainer = Trainer(config, loss=disturbed.loss, callbacks=[disturbed])
    summary = trainer.run()
    metrics = [json.loads(line) for line in (summary.directory / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics] == [1, 50, 64]
    assert [record["consumed_tokens"] for record in metrics] == [64, 3200, 4096]
    start, spike, skip, end = events = events_of(summary.directory)
    assert disturbed.events == events
    assert [(event["event"], event["step"]) for event in events] == [
        ("start", 0), ("loss_spike", SPIKE), ("not_finite", SKIP), ("end", 64),
    ]  # fmt: skip
    assert start["time"] <= metrics[0]["time"] <= spike["time"] <= end["time"]
    assert (start["pid"], start["ranks"], start["resumed"], end["outcome"]) == (os.getpid(), 1, False, "completed")
    assert spike["loss"] == pytest.approx(3 * spike["expected"], rel=0.1)
    assert skip["reason"] == "not finite: loss nan, gradient norm nan"
    for event in (spike, skip):
        tokens = torch.cat(disturbed.tokens[event["step"]])
        assert len(event["samples"]) == 4
        assert np.array_equal(trainer.loader.dataset.samples(np.array(event["samples"]))["tokens"], tokens)


def test_a_resumed_run_repeats_no_event_and_notices_spikes_at_once(tmp_path: Path) -> None:
    """The process ends at step 62 and resumes from step 52: both events belong to steps that run again."""

    class Stop(Callback):
        def on_step(self, trainer: TrainerView, step: int) -> None:
            if step == 62:
                raise ValueError("broken\nfile system")

    def run(steps: int, *callbacks: Callback) -> Path:
        disturbed = DisturbedSteps()
        checkpoint = {"every": 52, "resume": "auto"}
        config = configure(tmp_path, train={"steps": steps}, checkpoint={**checkpoint, "export_hf": False})
        return Trainer(config, loss=disturbed.loss, callbacks=[disturbed, *callbacks]).run().directory

    with pytest.raises(ValueError, match="broken"):
        run(64, Stop())
    run_directory = tmp_path / "run"
    first = [("start", 0), ("loss_spike", SPIKE), ("not_finite", SKIP), ("end", 62)]
    assert kinds(run_directory) == first
    assert events_of(run_directory)[-1]["error"] == "ValueError: broken file system"
    run(64)
    assert kinds(run_directory) == [first[0], first[3], ("start", 52), first[1], first[2], ("end", 64)]
    assert events_of(run_directory)[2]["resumed"]
    assert WARMUP_STEPS > SPIKE - 52  # the statistics came from the logged steps


def test_how_a_run_ended(tmp_path: Path) -> None:
    class Interrupt(Callback):
        def on_step(self, trainer: TrainerView, step: int) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    summary = Trainer(configure(tmp_path), callbacks=[Interrupt()]).run()
    assert events_of(summary.directory)[-1]["outcome"] == "interrupted"

    def never(output: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return output.logits().sum() * float("nan"), 1

    trainer = Trainer(configure(tmp_path, train={"max_skipped_steps": 2}), loss=never)
    with pytest.raises(RunStopped) as stopped:
        trainer.run()
    assert trainer.directory
    *_, skipped, end = events_of(trainer.directory)
    assert (skipped["event"], skipped["step"], end["outcome"]) == ("not_finite", 2, "failed")
    assert end["error"] == str(stopped.value)
    summary = Trainer(configure(tmp_path, train={"steps": 1}), loss=never).run()
    assert (summary.last_step_skipped, events_of(summary.directory)[-1]["outcome"]) == (True, "failed")
    assert "gradient of" in events_of(summary.directory)[1]["reason"]  # a logged step says more


def test_the_rule_for_spikes() -> None:
    rng = np.random.default_rng(0)

    def spikes(losses: Any, detector: LossSpikeDetector | None = None) -> list[int]:
        detector = detector or LossSpikeDetector()
        return [step for step, loss in enumerate(losses) if detector.add(float(loss)) is not None]

    steps = np.arange(20_000)
    falling = 2 + 8 * np.exp(-steps / 500) + rng.normal(0, 0.05, len(steps))
    assert spikes(falling) == []
    steep = 0.07 + 5.7 * np.exp(-steps[:400] / 15) + rng.normal(0, 0.01, 400)
    steep[[157, 200, 260]] += 1.1
    assert spikes(steep) == [157, 200, 260]  # neither the descent nor the other spikes hide one
    heavy_tails = 3 + 0.1 * rng.standard_t(8, len(steps))
    assert len(spikes(heavy_tails)) <= 3
    spiked = falling.copy()
    spiked[[20, 3000, 3001, 9000]] += 2.0
    spiked[4000] = np.nan
    assert spikes(spiked) == [3000, 9000]  # not during the warm-up; one event for two steps
    shifted = falling + 3 * (steps >= 5000)
    assert spikes(shifted) == [5000]
    shifted[5600] += 2.0  # the higher loss is normal by now
    assert spikes(shifted) == [5000, 5600]
    assert spikes([2.0] * 100 + [2.05, 2.2]) == [101]  # without noise: 5% above
    assert spikes([2.0, 9.0], LossSpikeDetector([2.0] * WARMUP_STEPS)) == [1]
    assert spikes([2.0, 9.0], LossSpikeDetector([2.0] * (WARMUP_STEPS - 2))) == []

"""Scores of the reference: computed once, found by the pair, in the run directory and in the cache of the user."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import configs
from trainyard import Trainer
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.run.frozen_weights import FrozenWeights
from trainyard.run.reference import REFERENCE_FILE
from trainyard.train.reference_scores import ReferenceScores

PAIRS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 7)} for a in range(4) for b in range(3)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def configure(tmp_path: Path, name: str = "run", pairs: list[dict[str, str]] = PAIRS, **sections: Any) -> Config:
    file = tmp_path / f"{name}.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    default: dict[str, Any] = {
        "data": {"source": "preference", "paths": str(file), "seq_len": 32, "validation_fraction": 0.25},
        "train": {"steps": 4, "global_batch": 4, "micro_batch": 2, "objective": "dpo"},
        "evaluate": {"every": 4},
        "schedule": {"kind": "constant"},
        "log": {"directory": str(tmp_path / "runs"), "name": name, "every": 1},
        "checkpoint": {"every": 2},
    }
    return configs.tiny_config(**{key: default.get(key, {}) | sections.get(key, {}) for key in default | sections})


def losses(directory: Path) -> dict[int, float]:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_run_begins_at_the_reference_and_reports_rewards(tmp_path: Path) -> None:
    directory = Trainer(configure(tmp_path)).run().directory
    first, *others = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["rewards/margin"] == pytest.approx(0, abs=1e-6)
    assert {"rewards/chosen", "rewards/rejected", "rewards/accuracy", "log_probs/chosen"} <= first.keys()
    assert any("evaluate/rewards/margin" in record for record in others)
    scores = ReferenceScores.read(directory / REFERENCE_FILE)
    assert len(scores.keys) == len(PAIRS)


def test_without_a_reference_dpo_compares_log_probabilities(tmp_path: Path) -> None:
    """With one pair in a batch, the loss follows from the metrics."""
    one = {"global_batch": 1, "micro_batch": 1}
    config = configure(tmp_path, train=one, preference={"reference_free": True, "beta": 0.3})
    directory = Trainer(config).run().directory
    first = json.loads((directory / "metrics.jsonl").read_text().splitlines()[0])
    margin = 0.3 * (first["log_probs/chosen"] - first["log_probs/rejected"])
    assert first["loss"] == pytest.approx(math.log1p(math.exp(-margin)), rel=1e-5)
    assert first["rewards/margin"] == pytest.approx(margin, rel=1e-5)
    assert abs(margin) > 1e-3
    assert not (directory / REFERENCE_FILE).exists()


def test_kto_begins_at_the_reference_and_resumes(tmp_path: Path) -> None:
    """Of pairs it takes both answers. Reward and KL are 0 in the first step, so each loss is half of its weight."""
    kto: dict[str, Any] = {"train": {"objective": "kto"}, "preference": {"undesirable_weight": 0.1, "beta": 1.0}}
    kto["optimizer"] = {"lr": 0.01}
    whole = Trainer(configure(tmp_path, "whole", **kto)).run().directory
    first, *others = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    last = next(record for record in reversed(others) if "kl" in record)
    assert 0.05 <= first["loss"] <= 0.5
    assert first["kl"] == pytest.approx(0, abs=1e-5)
    assert last["kl"] > 1e-3
    assert len(ReferenceScores.read(whole / REFERENCE_FILE).keys) == 2 * len(PAIRS)
    Trainer(configure(tmp_path, "half", **(kto | {"train": {"objective": "kto", "steps": 2}}))).run()
    resumed = Trainer(configure(tmp_path, "half", checkpoint={"resume": "auto"}, **kto)).run().directory
    assert losses(resumed) == losses(whole)


def test_another_run_finds_the_scores_of_its_pairs(tmp_path: Path) -> None:
    """In whatever order they are, and at another micro batch. The first loss shows that they come from the cache."""
    Trainer(configure(tmp_path)).run()
    (cached,) = (tmp_path / "cache" / "trainyard" / "reference").glob("*.npz")
    scores = ReferenceScores.read(cached)
    ReferenceScores(scores.keys, scores.scores + np.array([0, 10], np.float32)).write(cached)
    config = configure(tmp_path, "again", PAIRS[::-1], train={"micro_batch": 1})
    expected = math.log1p(math.exp(-0.1 * 10))  # every rejected answer is 10 less likely than the reference says
    assert losses(Trainer(config).run().directory)[1] == pytest.approx(expected, rel=1e-5)


def test_other_weights_have_other_scores(tmp_path: Path) -> None:
    Trainer(configure(tmp_path)).run()
    directory = Trainer(configure(tmp_path, "other", train={"seed": 5})).run().directory
    assert losses(directory)[1] == pytest.approx(math.log(2), rel=1e-6)


def test_a_resumed_run_has_the_same_losses(tmp_path: Path) -> None:
    whole = Trainer(configure(tmp_path, "whole")).run().directory
    half = Trainer(configure(tmp_path, "half", train={"steps": 2})).run().directory
    resumed = Trainer(configure(tmp_path, "half", checkpoint={"resume": "auto"})).run().directory
    assert resumed == half
    assert losses(resumed) == losses(whole)


def test_a_run_that_continues_elsewhere_finds_them(tmp_path: Path) -> None:
    whole = Trainer(configure(tmp_path, "whole")).run().directory
    for cached in (tmp_path / "cache" / "trainyard" / "reference").glob("*.npz"):
        cached.unlink()
    resume = {"resume": str(whole / "checkpoints" / "step_00000002")}
    resumed = Trainer(configure(tmp_path, "whole", log={"name": "branch"}, checkpoint=resume)).run().directory
    assert resumed != whole
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step > 2}


def test_a_model_that_has_changed_is_no_reference(tmp_path: Path) -> None:
    half = Trainer(configure(tmp_path, "half", train={"steps": 2})).run().directory
    (half / REFERENCE_FILE).unlink()
    for cached in (tmp_path / "cache" / "trainyard" / "reference").glob("*.npz"):
        cached.unlink()
    with pytest.raises(UserError, match=r"reference_scores.npz: lacks the scores .* the model has changed"):
        Trainer(configure(tmp_path, "half", checkpoint={"resume": "auto"})).run()


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"lora": {"rank": 2, "dropout": 0.1}, "precision": {"kind": "bf16"}},
        {"train": {"objective": "kto", "steps": 4, "global_batch": 4, "micro_batch": 2}},
    ],
    ids=["dpo", "lora", "kto"],
)
def test_a_live_reference_gives_the_stored_scores(tmp_path: Path, sections: dict[str, Any]) -> None:
    stored = Trainer(configure(tmp_path, "stored", **sections)).run().directory
    live = configure(tmp_path, "live", **sections, preference={"reference": "live"})
    directory = Trainer(live).run().directory
    assert not (directory / REFERENCE_FILE).exists()
    assert losses(directory) == pytest.approx(losses(stored), rel=1e-6)
    resumed = sections | {"checkpoint": {"resume": str(directory / "checkpoints" / "step_00000002")}}
    config = configure(tmp_path, "resumed", **resumed, preference={"reference": "live"})
    after = losses(Trainer(config).run().directory)
    assert after == {step: loss for step, loss in losses(directory).items() if step > 2}


def test_the_reference_waits_for_a_checkpoint_in_progress(tmp_path: Path) -> None:
    """Which would save the weights of the reference."""
    trainer, waited = Trainer(configure(tmp_path)), list[bool]()
    frozen = FrozenWeights(trainer)
    trainer.optimizer.fence_next_update(lambda: waited.append(True))
    with frozen.in_place():
        assert waited


def test_a_live_reference_needs_all_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"preference.reference=live: no rank has all weights with layout.zero=3"):
        configure(tmp_path, preference={"reference": "live"}, layout={"zero": 3})

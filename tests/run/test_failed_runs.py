"""A run that failed says so: non-finite weights, batches without labels, metrics that replace the loss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import configs
from trainyard import Trainer
from trainyard.config.schema import Config
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import RunStopped, UserError


def configure(tmp_path: Path, **sections: dict[str, Any]) -> Config:
    return configs.tiny_config(**{"log": {"directory": str(tmp_path)}, **sections})


def test_nonfinite_weights_are_neither_saved_nor_exported(tmp_path: Path) -> None:
    """A learning rate that fp32 cannot represent ruins the weights in a step whose loss and gradients are finite."""
    config = configure(
        tmp_path,
        train={"steps": 1},
        optimizer={"lr": 1e300},
        schedule={"kind": "constant"},
        checkpoint={"every": 1, "export_hf": True},
    )
    trainer = Trainer(config)
    with pytest.raises(RunStopped, match=r"^step 1: the weights are not finite \(their norm is nan\)"):
        trainer.run()
    assert trainer.directory
    assert not (trainer.directory / "model").exists()
    assert list((trainer.directory / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_batch_without_labels_makes_no_update(family: str, tmp_path: Path) -> None:
    """It was logged as loss 0.0, and momentum and weight decay still changed the weights."""
    trainer = Trainer(configs.tiny_config(family, log={"directory": str(tmp_path)}))
    batch = trainer.loader.batch(0, trainer.batch_slice)
    trainer.train_step(batch, 1, 1e-2)
    before = [buffer.clone() for buffer in trainer.optimizer.state.saved_buffers().values()]
    empty = {**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX)}
    if family == "bert":
        partial = trainer.train_step({**empty}, 2, 0.0)  # the other term still counts
        assert torch.isnan(partial.terms["mlm"])
        assert partial.loss == partial.terms["nsp"]
        before = [buffer.clone() for buffer in trainer.optimizer.state.saved_buffers().values()]
        empty["next_sentence_labels"] = torch.full_like(batch["next_sentence_labels"], IGNORE_INDEX)
    result = trainer.train_step(empty, 3, 1e-2)
    assert torch.isnan(result.loss)
    assert result.read_status()[:2] == (1, 1)
    for buffer, old in zip(trainer.optimizer.state.saved_buffers().values(), before, strict=True):
        assert torch.equal(buffer, old)


def test_batches_without_labels_are_reported_and_stop_the_run(tmp_path: Path) -> None:
    def nothing_counts(output: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return output.logits().sum() * 0, 0

    trainer = Trainer(configure(tmp_path, train={"steps": 9, "max_skipped_steps": 3}), loss=nothing_counts)
    with pytest.raises(RunStopped, match=r"^step 3: 3 steps in a row were skipped .*; no label of the batch counts; "):
        trainer.run()
    assert trainer.directory
    lines = [json.loads(line) for line in (trainer.directory / "metrics.jsonl").read_text().splitlines()]
    assert [(line["loss"], line["not_finite"]) for line in lines] == [("nan", "no label of the batch counts")] * 2


def test_evaluation_without_labels_is_not_a_loss_of_0(tmp_path: Path) -> None:
    def nothing_counts(output: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return output.logits().sum() * 0, 0

    config = configure(tmp_path, data={"validation_fraction": 2e-6}, evaluate={"every": 1, "batches": 1})
    result = Trainer(config, metrics={"accuracy": nothing_counts}, loss=nothing_counts).evaluate()
    assert str(result) == "{'loss': nan, 'accuracy': nan}"


@pytest.mark.parametrize("name", ["loss", "perplexity", "lm"])
def test_metric_with_the_name_of_a_result_is_refused(name: str, tmp_path: Path) -> None:
    """It silently replaced the loss of the evaluation."""

    def metric(output: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return torch.zeros(()), 1

    with pytest.raises(
        UserError, match=rf"^evaluate\.metrics\.{name}: the evaluation itself reports {name}; nearest: "
    ):
        Trainer(configure(tmp_path), metrics={name: metric})

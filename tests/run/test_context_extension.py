"""A run that starts from the weights of another one may have another context: other RoPE scaling, base and length."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import configs
from trainyard import models
from trainyard.core.errors import UserError
from trainyard.run.records import RunSummary
from trainyard.run.trainer import Trainer

YARN = {"kind": "yarn", "factor": 4.0, "original_max_positions": 64}
EXTENDED = {**configs.LLAMA, "max_positions": 256, "rope_scaling": YARN}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    directory = str(tmp_path_factory.mktemp("base"))
    checkpoint = {"every": 4, "export_hf": True}
    return Trainer(configs.tiny_config(checkpoint=checkpoint, log={"directory": directory})).run()


def continued(tmp_path: Path, model: dict[str, Any], **checkpoint: Any) -> Trainer:
    sections: dict[str, Any] = {"checkpoint": {"export_hf": True, **checkpoint}}
    return Trainer(configs.tiny_config(model, log={"directory": str(tmp_path), "name": "long"}, **sections))


@pytest.mark.parametrize("kind", ["run", "hf", "weights_only"])
def test_weights_with_another_context(
    tmp_path: Path, base: RunSummary, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its model computes what the weights compute with the new positions, and so does config.json."""
    start = {"run": {"init_from": str(base.directory)}, "hf": {"init_from": str(base.exported_weights)}}
    start["weights_only"] = {"resume": str(base.directory), "weights_only": True}
    with caplog.at_level(logging.WARNING):
        trainer = continued(tmp_path, EXTENDED, **start[kind])
    notes = [record.getMessage() for record in caplog.records if "other positions" in record.getMessage()]
    assert len(notes) == 1
    assert "model.max_positions=256 (before: 64), model.rope_scaling={'kind': 'yarn'" in notes[0]
    batch = {**trainer.loader.batch(0), "rng_key": torch.zeros(2, dtype=torch.int32)}
    section = trainer.config.model
    weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    expected = models.fill_parameters(models.build_model(section), weights.__getitem__)(batch).logits()
    plain = section.model_copy(update={"rope_scaling": None})
    unlike = models.fill_parameters(models.build_model(plain), weights.__getitem__)(batch).logits()
    logits = trainer.model(batch).logits()
    torch.testing.assert_close(logits, expected)
    assert (logits - unlike).abs().max() > 1e-4
    summary = trainer.run()
    assert summary.exported_weights
    written = json.loads((summary.exported_weights / "config.json").read_text())
    assert (written["max_position_embeddings"], written["rope_parameters"]["rope_type"]) == (256, "yarn")


def test_a_shorter_context_is_not_worth_a_note(
    tmp_path: Path, base: RunSummary, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        continued(tmp_path, {**configs.LLAMA, "max_positions": 32}, init_from=str(base.directory))
    assert "other positions" not in caplog.text


def test_what_has_weights_is_still_compared(tmp_path: Path, base: RunSummary) -> None:
    with pytest.raises(UserError, match=r"model\.ffn=40: .* has 48"):
        continued(tmp_path, {**EXTENDED, "ffn": 40}, init_from=str(base.directory))
    with pytest.raises(UserError, match=r"model\.rope_scaling=.*: the checkpoint .* has None; nearest: None, or "):
        continued(tmp_path, {**configs.LLAMA, "rope_scaling": YARN}, resume=str(base.directory))


def test_learned_positions_have_weights(tmp_path: Path) -> None:
    log = {"directory": str(tmp_path)}
    first = Trainer(configs.tiny_config("gpt", checkpoint={"every": 4}, log=log)).run()
    with pytest.raises(UserError, match=r"model\.max_positions=128: .* has 64"):
        continued(tmp_path, {**configs.GPT, "max_positions": 128}, init_from=str(first.directory))

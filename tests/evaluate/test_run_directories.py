"""Evaluation of run directories, with the tokenizer that a run saves."""

import os
import sys
from math import exp
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn import functional as F

from tests.evaluate.conftest import evaluate_one
from tests.support import user_code
from tests.support.configs import tiny_config
from tests.support.forkserver import ForkServer
from tests.support.hf_folders import TEXTS, hf_stream_loss
from trainyard.core.errors import UserError
from trainyard.evaluate.eval_config import evaluation_config
from trainyard.formats.hf import InMemoryWeights
from trainyard.formats.registry import open_weights
from trainyard.run.trainer import Trainer


def test_run_is_evaluated_with_its_own_loss_metrics_and_masks(tmp_path: Path, cli: ForkServer) -> None:
    config = tiny_config(
        data={"source": "text", "seq_len": 16, "document_mask": True, "mask_eod_loss": True},
        train={"steps": 1, "loss": f"{user_code.__name__}:capped_loss"},
        evaluate={"metrics": {"accuracy": f"{user_code.__name__}:accuracy"}},
        checkpoint={"every": 1, "export_hf": True},
        log={"directory": str(tmp_path), "name": "x"},
    )
    directory = Trainer(config).run().directory
    path = tmp_path / "valid.txt"
    path.write_text(TEXTS[1])
    result = evaluate_one(directory, path)
    tokens = torch.tensor([*TEXTS[1].encode(), 256])
    model = transformers.AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    total, correct, count = 0.0, 0, 0
    for start in range(0, len(tokens) - 1, 16):
        window = tokens[start : start + 17]
        logits, labels = model(window[None, :-1]).logits[0].detach(), window[1:]
        total += float(F.cross_entropy(user_code.soft_cap(logits), labels, reduction="sum"))
        correct, count = correct + int((logits.argmax(-1) == labels).sum()), count + len(labels)
    assert result["loss"] == pytest.approx(total / count, rel=1e-5)
    assert result["accuracy"] == pytest.approx(correct / count)
    masked = evaluation_config(open_weights(directory).weights, [], 1).data
    assert (masked.document_mask, masked.mask_eod_loss) == (True, True)
    plain = evaluate_one(directory, path, "train.loss=null")
    assert plain["perplexity"] == pytest.approx(exp(plain["loss"]))
    assert abs(plain["loss"] - result["loss"]) > 1e-3
    done = cli.run(["eval", str(directory), str(path), "train.loss=null", "device.name=cpu"])
    metric = f"evaluate.metrics={{'accuracy': '{user_code.__name__}:accuracy'}}"
    note = f"note: as in the run: {metric}, data.document_mask=True, data.mask_eod_loss=True"
    assert " ".join(done.stdout.split()).startswith(note), done


def test_functions_of_a_run_are_not_imported_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that somebody else wrote could name any file that lies there."""
    (tmp_path / "planted.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    weights = InMemoryWeights(tiny_config().model, torch.zeros)
    with pytest.raises(UserError) as error:
        evaluation_config(weights, [], 1, {"train.loss": "planted:loss"})
    assert str(error.value) == (
        "train.loss=planted:loss: of the run, but not in installed packages or PYTHONPATH: cannot import planted: No "
        "module named 'planted'; nearest: give train.loss=planted:loss again, or train.loss=null"
    )


def test_run_and_its_exported_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    config = tiny_config(
        data={"source": "text", "seq_len": 16},
        train={"steps": 2},
        checkpoint={"every": 2, "export_hf": True},
        log={"directory": str(tmp_path), "name": "x"},
    )
    directory = Trainer(config).run().directory
    path = tmp_path / "valid.txt"
    path.write_text(TEXTS[1])
    run, exported = evaluate_one(directory, path), evaluate_one(directory / "model", path, "data.seq_len=16")
    assert (run["loss"], run["tokens"], run["seq_len"]) == (exported["loss"], len(TEXTS[1].encode()), 16)
    assert run["bytes"] == len(TEXTS[1].encode()) - 1
    tokens = torch.tensor([*TEXTS[1].encode(), 256])
    model = transformers.AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    total, count = hf_stream_loss(model, tokens, 17, 16)
    assert run["loss"] == pytest.approx(total / count, rel=1e-6)

"""Evaluation of run directories, with the tokenizer that a run saves."""

import os
from pathlib import Path

import pytest
import torch
import transformers

from tests.evaluate.conftest import evaluate_one
from tests.support.configs import tiny_config
from tests.support.hf_folders import TEXTS, hf_stream_loss
from trainyard.train.trainer import Trainer


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

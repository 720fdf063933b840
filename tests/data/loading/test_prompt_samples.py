"""Prompts of files: each is encoded once, and long ones are left out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import configs
from trainyard.config.schema import Config
from trainyard.data.loading import prompt_samples
from trainyard.data.loading.build import build_datasets
from trainyard.data.loading.prompt_samples import PromptSamples
from trainyard.data.sources.prompts import SOURCE

PROMPTS = ["abc", "a" * 12, "de", "b" * 11, "f"]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The prompts that were encoded."""
    found: list[Any] = []
    encode = prompt_samples.encode_prompt
    monkeypatch.setattr(prompt_samples, "encode_prompt", lambda *args: (found.append(args[1]), encode(*args))[1])
    return found


def configure(tmp_path: Path) -> Config:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "answer": text}) + "\n" for text in PROMPTS))
    return configs.tiny_config(
        {**configs.LLAMA, "vocab": 257},
        data={"source": "prompts", "paths": str(file), "seq_len": 16, "chat": {"too_long": "drop"}},
        train={"objective": "grpo", "global_batch": 4, "micro_batch": 2},
        rollout={"rewards": ["trainyard.run.rollouts.rewards:exact"], "completions": 4, "max_new_tokens": 6},
    )


def test_encodes_once_and_drops_long_prompts(
    tmp_path: Path, encoded: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prompt_samples, "LOG_INTERVAL_S", -1.0)
    caplog.set_level("INFO", "trainyard")
    lines: list[int] = []
    describe = prompt_samples.describe_place
    monkeypatch.setattr(prompt_samples, "describe_place", lambda *args: (lines.append(1), describe(*args))[1])
    samples = build_datasets(configure(tmp_path))[0]
    assert isinstance(samples, PromptSamples)
    assert encoded == PROMPTS
    assert samples.prompts == ["abc", "de", "f"]
    assert [record["answer"] for record in samples.records] == samples.prompts
    assert samples.samples(np.array([1]))["tokens"][0, :3].tolist() == [*b"de", 0]
    assert not lines  # each reads the file from its start
    assert samples.source(1).endswith("prompts.jsonl: line 3")
    assert "dropped 2 prompts of 5" in caplog.text
    assert "encoding prompts: 5 so far" in caplog.text


def test_the_files_of_the_model_take_one_prompt(tmp_path: Path, encoded: list[Any]) -> None:
    config = configure(tmp_path)
    files = SOURCE.model_files(config.data, config.model, {})
    assert encoded == PROMPTS[:1]
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [256]

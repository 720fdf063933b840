"""`trainyard data show`: the samples it prints are those that the step trained on, for every kind of data."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.cli.conftest import Call, fail, succeed
from tests.data.loading import test_training as kinds
from tests.support import configs
from trainyard import Trainer
from trainyard.config.load import dump

STEP = 3


def demo_text(directory: Path) -> dict[str, Any]:
    return {"source": "text", "validation_fraction": 0.05}


def synthetic(directory: Path) -> dict[str, Any]:
    return {"source": "synthetic"}


SOURCES = {
    demo_text: r"the built-in text, token \d+ \(document \d+\)",
    synthetic: r"synthetic tokens \d+",
    kinds.tokens: r"a, token \d+ \(document \d\)",
    kinds.megatron: r"a, token \d+ of document \d",
    kinds.blend: r"[ab], token \d+ \(document \d\)",
    kinds.arrow: r"set/data-00000-of-00001.arrow, row \d+",
    kinds.hdf5: r"x_training_00000.hdf5, sample \d+",
}


@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_printed_samples_are_those_of_the_step(make: Any, call: Call, tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    def loss(output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(batch["tokens"].clone())
        logits = output.logits()
        return logits.square().sum(), torch.tensor(logits.numel())

    config = kinds.data_config(make(tmp_path), micro_batch=2)
    config = config.model_copy(update={"log": config.log.model_copy(update={"directory": str(tmp_path / "runs")})})
    directory = Trainer(config, loss=loss).run().directory
    expected = torch.cat(seen[2 * (STEP - 1) : 2 * STEP]).tolist()
    title, *lines = succeed(call("data", "show", directory, "--step", STEP)).splitlines()
    assert title == f"step {STEP} of 6: 4 samples, 4 shown"
    headings = [line for line in lines if not line.startswith(" ")]
    assert len(headings) == 4
    for heading in headings:
        assert re.fullmatch(rf"sample \d+: (?:/.*/)?{SOURCES[make]}", heading), heading
    contents = [line.strip() for line in lines if re.match('  [0-9"]', line)]
    if make is demo_text:
        byte_texts = [bytes(token for token in row if token < 256).decode(errors="replace") for row in expected]
        assert contents == [
            '"' + byte_text.replace("\\", "\\\\").replace("\n", "\\n") + '"' for byte_text in byte_texts
        ]
    else:
        assert contents == [" ".join(map(str, row)) for row in expected]
    if make is kinds.hdf5:
        assert [line.split(":")[0].strip() for line in lines if ": " in line and line[0] == " "] == [
            "masked", "second text",
        ] * 4  # fmt: skip


def test_rank_limit_and_tokenizer(call: Call, tmp_path: Path) -> None:
    """A run of two data-parallel ranks from step 2 on; its tokenizer is a file of its own."""
    words = {f"w{number}": number for number in range(259)} | {"</s>": 259}
    tokenizer = Tokenizer(models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    data = {**kinds.tokens(tmp_path), "tokenizer": str(tmp_path / "tokenizer.json")}
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump(kinds.data_config(data, 2)))
    (run / "events.jsonl").write_text(
        '{"step": 0, "event": "start", "ranks": 1}\n{"step": 1, "event": "start", "ranks": 2}\n'
    )
    everything = succeed(call("data", "show", run, "--step", 2)).splitlines()
    assert re.fullmatch(r'  "(w\d+ ?){16}"', everything[2])
    second = succeed(call("data", "show", run, "--step", 2, "--rank", 1)).splitlines()
    assert second == ["step 2 of 6: 2 samples of rank 1, 2 shown", *everything[5:]]
    one = succeed(call("data", "show", run, "--step", 2, "--rank", 1, "--limit", 1)).splitlines()
    assert one == ["step 2 of 6: 2 samples of rank 1, 1 shown", *everything[5:7]]
    fail(call("data", "show", run, "--step", 1, "--rank", 1), "--rank 1: the run has ranks 0 to 0")
    fail(call("data", "show", run, "--step", 2, "--rank", 2), "--rank 2: the run has ranks 0 to 1")
    (tmp_path / "tokenizer.json").unlink()
    code, out, err = call("data", "show", run, "--step", 2)
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("note: token ids, since the tokenizer cannot be read: data.tokenizer=")
    assert re.fullmatch(r"  (\d+ ?){16}", out.splitlines()[2])


def test_mistakes_are_one_line(call: Call, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fail(call("data", "show", run, "--step", 1), f"{run}: not a run directory: it has no config.yaml")
    run.mkdir()
    fail(call("data", "show", run, "--step", 1), f"{run}: not a run directory: it has no config.yaml")
    config = yaml.safe_load(dump(configs.tiny_config()))
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert succeed(call("data", "show", run, "--sample", 3)).startswith("sample 3: synthetic tokens 3")
    for step in (0, -3, 5):
        fail(call("data", "show", run, "--step", step), f"--step {step}: the run has steps 1 to 4")
    fail(call("data", "show", run, "--step", "x"), "Invalid value for '--step'")
    config["data"] |= {"source": "tokens", "paths": [str(tmp_path / "gone")]}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    fail(call("data", "show", run, "--step", 1), f"data.paths={tmp_path / 'gone'}: no such token files")
    (run / "config.yaml").write_text("train: [")
    fail(call("data", "show", run, "--step", 1), ".*config.yaml")


def test_what_is_trained_of_conversations_is_in_brackets(call: Call, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "Four."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    found = succeed(call("data", "show", tmp_path / "a.jsonl"))
    assert "<|im_start|>user\\n\nWhat is 2+2?<256>\\n\n<|im_start|>assistant\\n\n[[Four.<256>]]\\n" in found
    assert "60 tokens, 6 trained (10.0%)" in found
    fail(call("data", "show", tmp_path / "a.jsonl", "--sample", 1), "--sample 1: there are samples 0 to 0")
    facts = succeed(call("data", "inspect", tmp_path / "a.jsonl"))
    assert re.search(r"a.jsonl: conversations\n  formats +messages: 1\n  conversations +1\n", facts)

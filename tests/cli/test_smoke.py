"""`--smoke` keeps what the command line names, says what else it replaces, and takes the vocabulary from own data."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import yaml

from tests.cli.conftest import Call, succeed
from tests.support.token_files import write_documents
from trainyard.config.recipes import recipe_names


def smoke(call: Call, *arguments: str | Path) -> tuple[dict[str, Any], str]:
    """The configuration of a smoke run, and the notes about it."""
    code, out, err = call("config", *arguments, "--smoke")
    assert code == 0, err
    return yaml.safe_load(out), err


def value(config: dict[str, Any], dotted: str) -> Any:
    for key in dotted.split("."):
        config = config[key]
    return config


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("llama3-70b", ["layout.cp=2", "train.steps=3", "optimizer.lr=1e-4"]),
        ("llama3-70b", ["layout.tp=8"]),
        ("llama2-7b", ["model.heads=6", "model.kv_heads=3", "model.layers=5", "data.seq_len=256"]),
        ("gpt3-6.7b", ["train.global_batch=6", "checkpoint.every=7", "log.name=mine"]),
        ("gpt3-6.7b", ["data.source=synthetic", "model.vocab=1000"]),
        ("bert-large-phase1", ["train.micro_batch=3", "schedule.warmup_steps=1", "checkpoint.init_from=elsewhere"]),
        ("llama3.1-70b", ["evaluate.every=3", "data.validation_fraction=0.2"]),
    ],
)
def test_keys_of_the_command_line_are_kept(call: Call, recipe: str, overrides: list[str]) -> None:
    """Guards against a trial of something else: `layout.cp=2` became 1 in `config`, `verify` and `precompile`."""
    config, _ = smoke(call, recipe, *overrides)
    for override in overrides:
        key, _, text = override.partition("=")
        assert str(value(config, key)) == str(yaml.safe_load(text)) or value(config, key) == float(text), override


@pytest.mark.parametrize("recipe", recipe_names())
def test_a_trial_names_what_it_does_not_use(call: Call, recipe: str) -> None:
    full = yaml.safe_load(succeed(call("config", recipe)))
    config, notes = smoke(call, recipe)
    if full["data"]["paths"]:
        assert not config["data"]["paths"]
        assert "data.paths=" in notes
    for axis in ("tp", "pp", "cp"):
        assert (f"layout.{axis}={full['layout'][axis]}" in notes) == (full["layout"][axis] > 1)
    assert notes.count("\n") == (1 if full["data"]["paths"] else 0)


def test_validation_sets_are_kept_if_named(call: Call, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("base: tiny-llama\nevaluate: {sets: {web: w.txt, code: c.txt}}\n")
    config, note = smoke(call, "my.yaml", "evaluate.sets.code=d.txt")
    assert config["evaluate"]["sets"] == {"code": ["d.txt"]}
    assert "--smoke does not use evaluate.sets.web; keys named" in note
    assert smoke(call, "my.yaml", f"data.paths={Path(__file__)}")[0]["evaluate"]["sets"].keys() == {"web", "code"}


def test_own_tokens_are_trained_on_with_their_vocabulary(call: Call, tmp_path: Path) -> None:
    """Used to fail, because a trial has 320 tokens."""
    documents = [[np.random.default_rng(i).integers(0, 4_000, 300).tolist()] for i in range(8)]
    documents[3][0][7] = 4_999
    write_documents(tmp_path / "own", documents)
    own = [f"data.paths=[{tmp_path / 'own'}]", "data.split=8,0,0"]
    run = [
        "device.name=cpu",
        "log.directory=runs",
        "train.steps=2",
        "evaluate.every=0",
        "precision.kind=fp32",
        "log.loggers=[]",
    ]
    code, _, err = call("train", "gpt3-6.7b", "--smoke", *own, *run)
    assert code == 0, err
    config = yaml.safe_load((tmp_path / "runs/gpt3-6.7b-smoke/config.yaml").read_text())
    assert (config["model"]["vocab"], config["data"]["source"], config["data"]["seq_len"]) == (5_000, "tokens", 64)
    records = [json.loads(line) for line in (tmp_path / "runs/gpt3-6.7b-smoke/metrics.jsonl").read_text().splitlines()]
    assert records[0]["loss"] == pytest.approx(np.log(5_000), rel=0.02)  # a loss of 320 tokens would start at 5.8


def test_own_sentence_pairs_are_kept_for_bert(call: Call, tmp_path: Path) -> None:
    """BERT trained on synthetic samples although data.paths was named."""
    with h5py.File(tmp_path / "own.hdf5", "w") as file:
        tokens = np.random.default_rng(0).integers(5, 700, (16, 32))
        for name in ("input_ids", "input_mask", "segment_ids"):
            file[name] = {"input_ids": tokens, "input_mask": tokens * 0 + 1}.get(name, tokens * 0).astype("i4")
        file["masked_lm_positions"] = np.tile(np.arange(1, 6), (16, 1)).astype("i4")
        file["masked_lm_ids"] = tokens[:, 1:6].astype("i4")
        file["next_sentence_labels"] = np.zeros(16, "i1")
    own = [f"data.paths=[{tmp_path / 'own.hdf5'}]", "data.seq_len=32", "data.max_predictions=5"]
    config, notes = smoke(call, "bert-large-phase1", *own)
    assert config["data"]["source"] == "hdf5"
    assert config["data"]["paths"] == [str(tmp_path / "own.hdf5")]
    assert config["model"]["vocab"] == tokens.max() + 1
    assert "data.paths" not in notes

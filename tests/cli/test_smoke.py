"""`--smoke` keeps what the command line names, says what else it replaces, and takes the vocabulary from own data."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import transformers
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
    assert notes.count("\n") == (1 if full["data"]["paths"] or full["checkpoint"]["init_from"] else 0)


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


@pytest.mark.parametrize(
    "override",
    [
        *("train.steps=abc", "train.global_batch=[]", "train.micro_batch=null", "layout.tp=abc", "layout.pp={}"),
        *("layout.ranks=abc", "model.heads=abc", "model.experts=abc", "model.rope_scaling=abc", "model.family=[]"),
        *("model.family=llama4", "data.cache=7", "train=7", "data.seq_len=null", "profile.steps=abc", "a.b.c=1"),
    ],
)
@pytest.mark.parametrize("recipe", ["tiny-llama", "mixtral-8x7b"])
def test_mistake_is_the_line_of_a_run_without_smoke(call: Call, recipe: str, override: str) -> None:
    """A trial was computed from values that nobody had checked: a traceback."""
    code, _, line = call("config", recipe, override)
    assert code == 2
    assert call("config", recipe, override, "--smoke") == (2, "", line.replace(f"{recipe}: ", "", 1))


def test_trial_keeps_what_a_mixture_of_experts_has(call: Call) -> None:
    """Its groups, shared expert and layers without experts, in sizes that fit each other."""
    experts = {"experts": 64, "top_k": 8, "expert_groups": 8, "top_k_groups": 4, "shared_ffn": 900, "dense_ffn": 800}
    model = {**experts, "dense_layers": "0-2", "router_scores": "sigmoid"}
    Path("moe.yaml").write_text(yaml.safe_dump({"base": "mixtral-8x7b", "model": model}))
    small = smoke(call, "moe.yaml")[0]["model"]
    kept = ("experts", "top_k", "expert_groups", "top_k_groups", "shared_ffn", "dense_ffn", "dense_layers", "layers")
    assert [small[key] for key in kept] == [8, 4, 2, 1, small["hidden"], small["hidden"], "0", 2]
    assert small["router_scores"] == "sigmoid"


@pytest.mark.parametrize("override", ["data.cache.gib=10", "data.cache={gib: 10}"])
def test_key_of_an_inner_section_is_kept(call: Call, override: str) -> None:
    config, _ = smoke(call, "tiny-llama", override)
    assert config["data"]["cache"] == {"directory": None, "gib": 10.0}


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    """A model of Hugging Face's format, with sizes that no trial has."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=300,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=3,
            max_position_embeddings=32,
        )
    ).save_pretrained(tmp_path / "own")
    return tmp_path / "own"


@pytest.mark.parametrize("names_model", [True, False])
def test_trial_from_a_named_checkpoint_has_its_model(call: Call, model_directory: Path, names_model: bool) -> None:
    """The trial shrank the model and then failed, because the checkpoint did not fit."""
    overrides = [f"checkpoint.init_from={model_directory}", *[f"model.from_hf={model_directory}"] * names_model]
    config, _ = smoke(call, "tiny-llama", *overrides)
    sizes = [config["model"][key] for key in ("vocab", "hidden", "ffn", "layers", "heads", "kv_heads", "max_positions")]
    assert sizes == [300, 48, 80, 3, 6, 3, 32]
    assert (config["data"]["seq_len"], config["train"]["steps"]) == (32, 8)
    if names_model:
        run = ["device.name=cpu", "train.steps=1", "log.loggers=[]", "model.layers=3", "log.directory=runs"]
        code, out, err = call("train", "tiny-llama", "--smoke", *overrides, *run)
        assert code == 0, err
        assert "reading weights from" in out


def test_named_model_keeps_its_sizes(call: Call, model_directory: Path) -> None:
    config, _ = smoke(call, "gpt3-6.7b", f"model.from_hf={model_directory}", "data.source=synthetic", "model.layers=2")
    assert (config["model"]["family"], config["model"]["hidden"], config["model"]["layers"]) == ("llama", 48, 2)


def test_warm_up_longer_than_the_run_is_noted(call: Call) -> None:
    line = "note: schedule.warmup_steps=9: the run ends after train.steps=4, before the learning rate has reached"
    for option in ([], ["--smoke"]):
        code, _, err = call("config", "tiny-llama", "schedule.warmup_steps=9", "train.steps=4", *option)
        assert code == 0
        assert err.startswith(line)
        assert call("config", "tiny-llama", "schedule.warmup_steps=4", "train.steps=4", *option)[2] == ""

"""Configuration: what is accepted, and that every mistake is one line with key, value and the nearest valid one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import configs
from trainyard.config.load import dump, load, parse, schema_keys
from trainyard.config.recipes import recipe_names
from trainyard.config.schema import Config
from trainyard.core.errors import UserError


def write(path: Path, **changes: object) -> Path:
    data = {"model": dict(configs.LLAMA), "train": {"steps": 3}, "data": {"seq_len": 16}}
    for dotted, value in changes.items():
        node = data
        *parents, leaf = dotted.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    path.write_text(yaml.safe_dump(data))
    return path


MISTAKES = [
    # overrides, then what the line must say
    (["model.hiden=3"], ["model.hiden=3", "unknown key", "model.hidden"]),
    (["tarin.steps=3"], ["tarin", "unknown key", "train"]),
    (["train.lr=1e-3"], ["train.lr=0.001", "unknown key", "optimizer.lr"]),
    (["model.rope_scaling={kind: linear, facter: 2.0}"], ["model.rope_scaling.facter", "factor"]),
    (["train.steps=abc"], ["train.steps=abc", "not a whole number"]),
    (["train.steps=2.5"], ["train.steps=2.5", "not a whole number", "nearest: 2"]),
    (["train.steps=0"], ["train.steps=0", "at least 1", "nearest: 1"]),
    (["train.steps=-4"], ["train.steps=-4", "nearest: 1"]),
    (["optimizer.lr=0"], ["optimizer.lr=0", "above 0", "nearest: 0.0003"]),
    (["optimizer.beta1=1.0"], ["optimizer.beta1=1.0", "below 1", "nearest: 0.9"]),
    (["optimizer.lr=fast"], ["optimizer.lr=fast", "not a number", "nearest: 0.0003"]),
    (["optimizer.kind=adam"], ["optimizer.kind=adam", "nearest: adamw"]),
    (["schedule.kind=cosin"], ["schedule.kind=cosin", "nearest: cosine"]),
    (["precision.kind=fp16"], ["precision.kind=fp16", "fp32"]),
    (["layout.zero=4"], ["layout.zero=4", "at most 3", "nearest: 3"]),
    (["compile.enabled=1"], ["compile.enabled=1", "true or false", "nearest: false"]),
    (["model.family=lama"], ["model.family=lama", "nearest: llama"]),
    (["model.heads=5"], ["model.heads=5", "hidden=32", "nearest: 4"]),
    (["model.kv_heads=3"], ["model.kv_heads=3", "heads=4", "nearest: 2"]),
    (["model.head_dim=7"], ["model.head_dim=7", "even", "6 or 8"]),
    (["train.global_batch=10", "train.micro_batch=4"], ["train.global_batch=10", "micro_batch=4", "8 or 12"]),
    (["data.seq_len=100"], ["data.seq_len=100", "max_positions=64", "nearest: 64"]),
    (["schedule.min_lr=1.0"], ["schedule.min_lr=1", "optimizer.lr", "nearest: 0.0003"]),
    (["recompute.kind=selective"], ["recompute.modules", "mlp"]),
    (["recompute.modules=[mlp]"], ["recompute.modules", "kind=selective"]),
    (["recompute.kind=selective", "recompute.modules=[mlps]"], ["recompute.modules.0=mlps", "nearest: mlp"]),
    (["layout.pp=4", "layout.pipeline_cuts=[1,1,2]"], ["layout.pipeline_cuts", "rising"]),
    (["layout.vpp=2"], ["layout.vpp=2", "pp above 1", "nearest: 1"]),
    (["layout.pp=2", "layout.pipeline_schedule=zbv"], ["layout.vpp=1", "pipeline_schedule=zbv", "nearest: 2"]),
    (
        ["layout.pp=2", "layout.pipeline_schedule=zero_bubble", "compile.enabled=true"],
        ["layout.pipeline_schedule=zero_bubble", "1f1b"],
    ),
    (
        ["layout.zero=2", "precision.kind=bf16_sr", "precision.grad_dtype=fp32"],
        ["precision.grad_dtype=fp32", "nearest: bf16"],
    ),
    (["layout.zero=4"], ["layout.zero=4"]),
    (["layout.pp=2", "layout.pipeline_schedule=zero_bubble", "layout.zero=2"], ["layout.zero=2", "nearest: zero=1"]),
    (["layout.cp_method=rings"], ["layout.cp_method=rings", "nearest: ring"]),
    (["data.paths=a.txt"], ["data.paths=a.txt", "not a list", "nearest: [a.txt]"]),
    (["device.name=gpu"], ["device.name=gpu", "auto"]),
    (["precision.grad_dtype=bf16"], ["precision.grad_dtype=bf16", "nearest: grad_dtype=fp32"]),
    (["evaluate.every=10"], ["evaluate.every=10", "data.validation_fraction"]),
    (["train.loss=my_loss"], ["train.loss=my_loss", "my_module:my_function"]),
    (["data.tokenizer=gpt2"], ["data.tokenizer=gpt2", "vocab_file"]),
    (["model=null"], ["model"]),
    (["train=7"], ["train=7", "a mapping"]),
    (["steps"], ["steps", "section.key=value"]),
    (["model.hidden.x=1"], ["hidden is a value"]),
]


@pytest.mark.parametrize(("overrides", "words"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_one_line(tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load(write(tmp_path / "run.yaml"), overrides)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line, line


def test_bert_mistakes() -> None:
    base = {"model": configs.BERT, "train": {"steps": 1}}
    for data, words in (
        ({"source": "text", "seq_len": 16}, "data.source=text"),
        ({"source": "synthetic", "seq_len": 16, "max_predictions": 20}, "data.max_predictions=20"),
        (
            {"source": "synthetic", "seq_len": 16, "max_predictions": 4, "document_mask": True},
            "data.document_mask=true",
        ),
    ):
        with pytest.raises(UserError, match=words):
            parse({**base, "data": data})


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 3}\n")
    with pytest.raises(UserError, match="model"):
        load(path)
    path.write_text("model: {family: llama, vocab: 10}\ntrain: {steps: 3}\n")
    with pytest.raises(UserError, match=r"model\.hidden: missing.*Width"):
        load(path)
    path.write_text("model: {vocab: 10}\ntrain: {steps: 3}\n")
    with pytest.raises(UserError, match=r"model\.family: missing; one of llama, gpt, bert"):
        load(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: [", "1: not valid YAML"),
        ("train: {steps: 1}\ntrain: {steps: 2}\n", "given twice"),
        ("just words\n", "a mapping"),
        ("", "a mapping"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_binary_file_and_directory(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "x.yaml")
    with pytest.raises(UserError, match="a directory"):
        load(tmp_path)
    with pytest.raises(UserError, match="nearest recipe: llama2-7b"):
        load("llama2-7")


def test_overrides_and_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml")
    config = load(
        path, ["optimizer.lr=3e-4", "train.steps=7", "layout.pipeline_cuts=[]", "log.name=x", "data.paths=[a, b]"]
    )
    assert (config.optimizer.lr, config.train.steps, config.log.name, config.data.paths) == (3e-4, 7, "x", ("a", "b"))


@pytest.mark.parametrize("name", recipe_names())
def test_resolved_file_reads_back_equal(name: str, tmp_path: Path) -> None:
    config = load(name)
    path = tmp_path / "config.yaml"
    path.write_text(dump(config))
    assert load(path) == config


def test_model_from_a_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        )
    )
    config = parse(
        {"model": {"from_hf": str(tmp_path), "hidden_dropout": 0.0}, "train": {"steps": 1}, "data": {"seq_len": 16}}
    )
    assert (config.model.family, config.model.vocab) == ("gpt", 300)
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0.0, 0.1)
    with pytest.raises(UserError, match=r"nowhere.*config\.json"):
        parse({"model": {"from_hf": "nowhere/config.json"}, "train": {"steps": 1}})


def test_every_key_says_what_it_means_and_what_it_takes() -> None:
    rows = list(schema_keys())
    assert len(rows) > 80
    for key in rows:
        assert len(key.meaning) > 10, key.name
        assert key.allowed, key.name
    by_name = {key.name: key for key in rows}
    assert by_name["train.steps"].allowed == "whole number, >= 1"
    assert by_name["optimizer.beta1"].allowed == "number, >= 0, < 1"
    assert by_name["schedule.kind"].allowed == "cosine, linear, constant, wsd"
    assert "model[llama].rope_scaling[linear].factor" in by_name
    sections = {name.split(".")[0].split("[")[0] for name in by_name if "." in name}
    assert sections == set(Config.model_fields) - {"description", "hardware"}


def test_the_reference_page_is_up_to_date() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "scripts/reference.py", "/dev/stdout"], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == (root / "docs" / "keys.md").read_text(), "run: python scripts/reference.py"

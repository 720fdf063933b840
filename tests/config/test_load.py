"""Loading configurations: every mistake is one line with the key, the value and the nearest valid value."""

import copy
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.support import configs
from trainyard import devices
from trainyard.cli.run_config import load_source
from trainyard.config.load import dump, load, parse
from trainyard.config.recipes import recipe_names
from trainyard.config.schema import Config
from trainyard.config.schema_docs import schema_keys
from trainyard.core.errors import UserError
from trainyard.core.user_code import load_object
from trainyard.families.hf_config import to_hf
from trainyard.families.linear_wrapper import LINEAR_WRAPPERS

ROOT = Path(__file__).parents[2]
BASE = {"model": configs.LLAMA, "train": {"steps": 3}, "data": {"seq_len": 16}}


def base_file(directory: Path) -> Path:
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(BASE))
    return path


MISTAKES = [
    # overrides, parts of the error line
    (["model.hiden=3"], ["model.hiden=3", "unknown key", "model.hidden"]),
    (["model.hidden_dropout=0.1"], ["model.hidden_dropout=0.1", "unknown key here; bert, gpt and opt have it"]),
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
    (["layout.pp=4", "layout.pipeline_cuts=[1,1,2]"], ["layout.pipeline_cuts", "increasing"]),
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
    (["evaluate.sets={a/b: x.txt}"], ["evaluate.sets", "a/b", "wrong form"]),
    (["evaluate.sets.web=[]"], ["evaluate.sets.web=[]", "names no file"]),
    (["evaluate.sets=valid.txt"], ["evaluate.sets=valid.txt", "not a mapping"]),
    (["evaluate.sets.web=3"], ["evaluate.sets.web=3", "not a list", "nearest: [3]"]),
    (["evaluate.sets.web=a.txt", "evaluate.function=a:b"], ["evaluate.function=a:b", "set only one"]),
    (["evaluate.sets.web=a.txt", "data.source=synthetic"], ["evaluate.sets", "data.source=synthetic"]),
    (["evaluate.every=2"], ["evaluate.every=2", "no samples are held out", "evaluate.sets"]),
    (["data.paths=3"], ["data.paths=3", "not a list", "nearest: [3]"]),
    (["data.paths=''"], ["data.paths=", "not a list"]),
    (["device.name=gpu"], ["device.name=gpu", "nearest: cuda"]),
    (["precision.grad_dtype=bf16"], ["precision.grad_dtype=bf16", "nearest: grad_dtype=fp32"]),
    (["evaluate.every=10"], ["evaluate.every=10", "data.validation_fraction"]),
    (["train.loss=my_loss"], ["train.loss=my_loss", "my_module:my_function"]),
    (["data.tokenizer=gpt2"], ["data.tokenizer=gpt2", "vocab_file"]),
    (["model=null"], ["model"]),
    (["train=7"], ["train=7", "train is a section", "train.steps"]),
    (["steps"], ["steps", "section.key=value"]),
    (["model.hidden.x=1"], ["hidden is a value"]),
    (["model.hidden=1000000001"], ["model.hidden=1000000001", "nearest: 1048576"]),  # used to hang
    (["model.hidden=1048573"], ["model.heads=4", "nearest: 1"]),  # a prime number
    (["model.layers=100000000"], ["model.layers=100000000", "nearest: 10000"]),  # used to hang
    (["model.vocab=100000000000"], ["model.vocab=100000000000", "at most"]),
    (["device.threads=1000000"], ["device.threads=1000000", "nearest: 1024"]),  # used to crash the process
    (["device=cuda"], ["device=cuda: device is a section; set one of its keys, such as device.name"]),
    (["model=[a, b]"], ["model=['a', 'b']: model is a section", "model.family"]),
    (["data.cache=7"], ["data.cache=7: data.cache is a section", "data.cache.directory"]),
    (["data.weights=[1,2]"], [": data.weights=[1.0, 2.0]: 2 weights for 0 data.paths"]),
    (["data.split=50,50"], [": data.split=50,50: requires data.source=tokens; found text"]),
    (["data.split=98,1,1", "data.source=tokens"], [": data.paths: missing; data.source=tokens reads files"]),
    (["data.mask_eod_loss=true", "data.source=synthetic"], [": data.mask_eod_loss=true: requires"]),
    (["checkpoint.memory_every=2"], [": checkpoint.memory_every=2: needs checkpoints", "checkpoint.every"]),
    (["checkpoint.weights_only=true"], [": checkpoint.weights_only=true: requires the path of a checkpoint"]),
    (["model.family=7"], ["model.family=7: not one of bert, "]),
    (["model.family=llama4"], ["model.family=llama4: not one of bert", "nearest: llama"]),
    (["optimizer.kind=zzzzzz"], ["optimizer.kind=zzzzzz: not one of adamw, lamb, muon, or module:Class"]),
    (["log.name=2024-99-99x", "train.steps=2024-99-99"], ["train.steps=2024-99-99"]),  # a date that YAML cannot read
    (["train.steps=many"], ["train.steps=many", "needed: whole number, >= 1 (Optimizer steps)"]),
]


def test_the_input_stays_as_it_is() -> None:
    data = copy.deepcopy(BASE)
    assert parse(data, ["train.steps=7"]).train.steps == 7
    assert data == BASE


@pytest.mark.parametrize(("overrides", "parts"), MISTAKES, ids=[" ".join(mistake[0]) for mistake in MISTAKES])
def test_mistake_is_reported_on_one_line(tmp_path: Path, overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load(base_file(tmp_path), overrides)
    line = str(caught.value)
    assert "\n" not in line
    for part in parts:
        assert part in line, line


def test_bert_data_is_checked() -> None:
    base = {"model": configs.BERT, "train": {"steps": 1}}
    for data, message in (
        ({"source": "text", "seq_len": 16}, "data.source=text"),
        ({"source": "synthetic", "seq_len": 16, "max_predictions": 20}, "data.max_predictions=20"),
        (
            {"source": "synthetic", "seq_len": 16, "max_predictions": 4, "document_mask": True},
            "data.document_mask=true",
        ),
    ):
        with pytest.raises(UserError, match=message):
            parse({**base, "data": data})


def test_missing_keys_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 3}\n")
    with pytest.raises(UserError, match="model"):
        load(path)
    path.write_text("model: {family: llama, vocab: 10}\ntrain: {steps: 3}\n")
    with pytest.raises(UserError, match=r"model\.hidden: missing.*Hidden size"):
        load(path)
    path.write_text("model: {vocab: 10}\ntrain: {steps: 3}\n")
    with pytest.raises(UserError, match=r"model\.family: missing; one of bert, "):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "1: not valid YAML"),
        ("train: {steps: 1}\ntrain: {steps: 2}\n", "duplicate key train"),
        ("just words\n", "a mapping"),
        ("", "a mapping"),
        ("model: [a, b]\ntrain: {steps: 2}\n", "model is a section"),
        ("model: 7\ntrain: {steps: 2}\n", "model is a section"),
        ("train: &a {steps: *a}\n", "1: not valid YAML: an anchor contains itself"),
        ("train:\n  x: &a [1, *a]\n", "2: not valid YAML: an anchor contains itself"),
        ("a: &a [1, 2]\n" + "".join(f"{b}: &{b} [{f'*{a},' * 9}]\n" for a, b in pairwise("abcdefghi")), "its aliases"),
    ],
)
def test_invalid_file_is_reported_with_its_path(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_binary_file_directory_and_unknown_recipe_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "x.yaml")
    with pytest.raises(UserError, match="a directory"):
        load(tmp_path)
    with pytest.raises(UserError, match="nearest recipe: llama2-7b"):
        load("llama2-7")


def test_overrides_are_parsed_as_yaml(tmp_path: Path) -> None:
    path = base_file(tmp_path)
    config = load(
        path, ["optimizer.lr=3e-4", "train.steps=7", "layout.pipeline_cuts=[]", "log.name=x", "data.paths=[a, b]"]
    )
    assert (config.optimizer.lr, config.train.steps, config.log.name, config.data.paths) == (3e-4, 7, "x", ("a", "b"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.paths", "my file.txt"),
        ("samples.prompts", "Once upon a time"),
        ("log.loggers", "wandb"),
        ("train.callbacks", "mine:Callback"),
        ("recompute.modules", "mlp"),
    ],
)
def test_one_text_stands_for_a_list_of_one(key: str, value: str, tmp_path: Path) -> None:
    overrides = ["recompute.kind=selective"] if key == "recompute.modules" else []
    config = load(base_file(tmp_path), [*overrides, f"{key}={value}"])
    assert config == load(base_file(tmp_path), [*overrides, f"{key}=[{value}]"])


@pytest.mark.parametrize("name", recipe_names())
def test_dumped_recipe_loads_back_equal(name: str, tmp_path: Path) -> None:
    config = load(name)
    path = tmp_path / "config.yaml"
    path.write_text(dump(config))
    assert load(path) == config


LLAMA3_SCALING = "{kind: llama3, factor: 8.0, original_max_positions: 128}"


def write_files(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)


def test_file_with_a_base_holds_only_what_differs(tmp_path: Path) -> None:
    """Mappings merge, all else is replaced; the command line comes last. A path starts at the file that names it."""
    write_files(
        tmp_path,
        {
            "my.yaml": "base: team/all.yaml\nlog: {loggers: [wandb]}\nprofile: {ranks: [1]}\ntrain: {steps: 5}\n",
            "team/all.yaml": "base: ours.yaml\nmodel: {layers: 2}\ntrain: {steps: 7, seed: 3}\n",
            "team/ours.yaml": "base: tiny-llama\nlog: {name: ours, loggers: [tensorboard, mlflow]}\n",
        },
    )
    config, recipe = load(tmp_path / "my.yaml", ["train.seed=4"]), load("tiny-llama")
    assert (config.train.steps, config.train.seed, config.model.layers) == (5, 4, 2)
    assert (config.log.name, config.log.loggers, config.profile.ranks) == ("ours", ("wandb",), (1,))
    changed = {"log": config.log, "profile": config.profile, "train": config.train, "model": config.model}
    assert config == recipe.model_copy(update=changed)
    assert config.model == recipe.model.model_copy(update={"layers": 2})
    (tmp_path / "saved.yaml").write_text(dump(config))
    assert "base" not in yaml.safe_load(dump(config))
    assert load(tmp_path / "saved.yaml") == config


def test_section_of_another_kind_replaces_that_of_the_base(tmp_path: Path) -> None:
    """Keys of one family are unknown to another; sizes of the base must not override those of config.json."""
    write_files(
        tmp_path,
        {
            "scaled.yaml": f"base: tiny-llama\nmodel: {{rope_scaling: {LLAMA3_SCALING}}}\n",
            "linear.yaml": "base: scaled.yaml\nmodel: {rope_scaling: {kind: linear, factor: 2.0}}\n",
            "plain.yaml": "base: scaled.yaml\nmodel: {rope_scaling: null}\n",
            "gpt.yaml": "base: scaled.yaml\n" + yaml.safe_dump({"model": configs.GPT, "data": {"seq_len": 16}}),
        },
    )
    linear = load(tmp_path / "linear.yaml").model
    assert linear.model_dump()["rope_scaling"] == {"kind": "linear", "factor": 2.0}
    assert linear.hidden == load("tiny-llama").model.hidden
    assert load(tmp_path / "plain.yaml").model == load("tiny-llama").model
    assert load(tmp_path / "gpt.yaml").model == parse({**BASE, "model": configs.GPT}).model
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        )
    )
    (tmp_path / "hf.yaml").write_text(f"base: tiny-llama\nmodel: {{from_hf: {tmp_path}}}\ndata: {{seq_len: 16}}\n")
    (tmp_path / "deep.yaml").write_text("base: hf.yaml\nmodel: {layers: 3}\n")
    sizes = load(tmp_path / "deep.yaml").model
    assert (sizes.family, sizes.vocab, sizes.hidden, sizes.layers) == ("gpt", 300, 32, 3)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"my.yaml": "base: my.yaml\n"}, "my.yaml: base=my.yaml: .* my.yaml -> my.yaml"),
        (
            {"my.yaml": "base: sub/b.yaml\n", "sub/b.yaml": "base: c.yaml\n", "sub/c.yaml": "base: ../my.yaml\n"},
            r"c.yaml: base=\.\./my.yaml: .* my.yaml -> b.yaml -> c.yaml -> my.yaml",
        ),
        ({"my.yaml": "base: tiny-lama\n"}, "my.yaml: base=tiny-lama: no such file or recipe; .* tiny-llama"),
        ({"my.yaml": "base: sub/b.yaml\n", "sub/b.yaml": "base: sub/c.yaml\n"}, "sub/b.yaml: base=sub/c.yaml: no such"),
        ({"my.yaml": "base: b.yaml\n", "b.yaml": "model: [\n"}, "b.yaml:2: not valid YAML"),
        ({"my.yaml": "base: [tiny-llama]\n"}, "my.yaml: base=.*: not a recipe or file"),
        ({"my.yaml": "base:\n"}, "my.yaml: base=null: not a recipe or file"),
    ],
)
def test_wrong_base_is_reported_on_one_line(tmp_path: Path, files: dict[str, str], message: str) -> None:
    write_files(tmp_path, files)
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path / "my.yaml")
    assert "\n" not in str(caught.value)


def test_base_may_be_a_run_or_a_file_of_nxd_training(tmp_path: Path) -> None:
    write_files(tmp_path, {"runs/config.yaml": dump(load("tiny-llama")), "my.yaml": "base: runs\ntrain: {steps: 5}\n"})
    assert load(tmp_path / "my.yaml") == load("tiny-llama", ["train.steps=5"])
    theirs = ROOT / "tests" / "config" / "nxdt" / "hf_llama3_8B.yaml"
    (tmp_path / "my.yaml").write_text(f"base: {theirs}\ntrain: {{steps: 5}}\n")
    notes: list[str] = []
    overrides = ["data.paths=[data]"]
    assert load_source(tmp_path / "my.yaml", overrides, notes.append) == load_source(
        theirs, [*overrides, "train.steps=5"], notes.append
    )
    assert any("a file of NxD Training" in note for note in notes)


def test_command_line_cannot_name_a_base() -> None:
    with pytest.raises(UserError, match="base=llama2-7b: only a file can have a base"):
        load("tiny-llama", ["base=llama2-7b"])


def test_model_sizes_come_from_config_json(tmp_path: Path) -> None:
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


def test_model_of_the_command_line_replaces_the_model_of_the_file(tmp_path: Path) -> None:
    """Every key of the file took precedence, so that model.from_hf changed nothing."""
    other = parse({**BASE, "model": {**configs.LLAMA, "layers": 3, "hidden": 64}}).model
    (tmp_path / "config.json").write_text(json.dumps(to_hf(other)))
    config = load(base_file(tmp_path), [f"model.from_hf={tmp_path}", "model.init_std=0.5"])
    assert (config.model.layers, config.model.hidden, config.model.init_std) == (3, 64, 0.5)
    file = {**BASE, "model": {"from_hf": "nowhere", "init_std": 0.3}}
    assert parse(file, [f"model.from_hf={tmp_path}"]).model.init_std == 0.3


def test_every_key_is_documented() -> None:
    keys = list(schema_keys())
    assert len(keys) > 80
    for key in keys:
        assert len(key.meaning) > 10, key.name
        assert key.allowed, key.name
    by_name = {key.name: key for key in keys}
    assert by_name["train.steps"].allowed == "whole number, >= 1"
    assert by_name["optimizer.beta1"].allowed == "number, >= 0, < 1"
    assert by_name["schedule.kind"].allowed == "cosine, linear, constant, wsd, module:function"
    assert "model[llama].rope_scaling[linear].factor" in by_name
    sections = {name.split(".")[0].split("[")[0] for name in by_name if "." in name}
    own = {*Config.model_fields, *LINEAR_WRAPPERS.built_in}
    assert sections == own - {"base", "description", "hardware"}


@pytest.mark.parametrize("name", devices.DEVICES.built_in)
def test_devices_are_of_their_kind(name: str) -> None:
    kind = devices.DEVICES.find(name)
    device_class = load_object(kind.module, "a device")
    assert device_class.kind == kind
    assert device_class.name == name


def test_config_command_imports_nothing_slow(tmp_path: Path) -> None:
    """Start-up takes under 0.5 s of CPU time on a quiet machine; importing torch alone takes several times as long."""
    slow = ("torch", "numpy", "pyarrow", "h5py", "transformers", "tensorboard", "starlette", "uvicorn", "http.server")
    slow += ("huggingface_hub", "fsspec", "httpx", "tarfile")
    code = (
        "import sys\nfrom trainyard.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as error:\n    assert error.code == 0\n"
        f"print([name for name in {slow} if name in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "config", str(base_file(tmp_path))]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert parse(yaml.safe_load(output.stdout)) == load(base_file(tmp_path))
    assert output.stderr == "[]\n"

"""A family from outside the package: examples/nemotron, without a line about it in the package."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from pydantic import create_model
from torch import Tensor, nn

from tests.inference.test_generate import load, run_prompts
from tests.support import configs
from tests.support.forkserver import ForkServer
from tests.support.hf_reference import LLAMA, hf_forward
from trainyard import models
from trainyard.checkpoint.weights import local_values
from trainyard.config.load import parse
from trainyard.core.errors import UserError
from trainyard.families import Family, ParamSpec, find_family, registry
from trainyard.families.hf_config import from_hf, to_hf
from trainyard.formats.convert import ConversionTarget, convert_checkpoint
from trainyard.formats.hf import InMemoryWeights, hf_tensors, weights_from_tensors
from trainyard.formats.io.lazy_tensor import InlineTensor
from trainyard.formats.registry import open_weights
from trainyard.run.trainer import Trainer
from trainyard.train.losses.causal_lm import CausalLoss

EXAMPLE = Path(__file__).parents[2] / "examples" / "nemotron"
NAME = "nemotron:FAMILY"
SIZES = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(EXAMPLE)
    yield
    find_family.cache_clear()
    registry.all_families.cache_clear()


def as_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if an installed package had the entry point nemotron = "nemotron:FAMILY"."""
    entry = metadata.EntryPoint("nemotron", NAME, registry.FAMILIES.group)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry])
    registry.all_families.cache_clear()


def test_logits_loss_and_gradients_equal_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    as_entry_point(monkeypatch)
    torch.manual_seed(1)
    sizes = {**SIZES, "num_key_value_heads": 1, "head_dim": 20}
    hf = transformers.NemotronForCausalLM(transformers.NemotronConfig(**sizes)).eval()
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    section = from_hf(json.loads(hf.config.to_json_string()))
    assert section.family == "nemotron"
    assert from_hf(to_hf(section)) == section
    values = local_values(weights_from_tensors(section, {k: InlineTensor(v) for k, v in hf.state_dict().items()}))
    model = models.fill_parameters(models.build_model(section), lambda name: values(name).clone())
    batch = configs.tiny_batch("llama")
    hf_logits, hf_loss = hf_forward("nemotron", hf, batch)
    output = model(batch)
    torch.testing.assert_close(output.logits(), hf_logits, atol=1e-5, rtol=1e-5)
    total, count = CausalLoss().terms(output, batch)["lm"]
    (total / count).backward()
    hf_loss.backward()
    parameters = dict(model.named_parameters())
    gradients = dict(hf_tensors(InMemoryWeights(section, lambda name: parameters[name].grad)))
    for name, parameter in hf.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-5)


def test_train_resume_convert_and_generate(cli: ForkServer, tmp_path: Path) -> None:
    """Every command finds the family by its name; the current directory counts for a file, not for a checkpoint."""
    for file in EXAMPLE.glob("nemotron*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    options = ["log.loggers=[]", "log.every=1", "checkpoint.every=2", "device.name=cpu"]
    run = ["train", "nemotron-tiny.yaml", "train.steps=2", *options]
    assert cli.run(run, cwd=tmp_path).returncode == 0
    resumed = cli.run([*run, "train.steps=3", "checkpoint.resume=auto"], cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    checkpoint = str(next((tmp_path / "runs").glob("nemotron-tiny*")))
    tokens = run_prompts(load(checkpoint), [[1, 2, 3]], max_new_tokens=3)
    assert len(tokens[0]) == 3
    convert_checkpoint(
        open_weights(checkpoint), checkpoint, tmp_path / "hf", ConversionTarget("hf", {}), lambda size: None
    )
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "nemotron"
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.config.hidden_act == "relu2"
    command = [Path(sys.executable).with_name("trainyard"), "generate", checkpoint, "--prompt", "The"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "cannot import nemotron" in refused.stderr
    assert "PYTHONPATH" in refused.stderr


def test_a_run_starts_from_a_config_json_that_only_the_family_knows(cli: ForkServer, tmp_path: Path) -> None:
    """Neither an entry point nor a copy of the sizes is needed."""
    (tmp_path / "outside.py").write_text(
        "from dataclasses import replace\n"
        "import nemotron\n"
        "FAMILY = replace(nemotron.FAMILY, name='outside', hf=replace(nemotron.FAMILY.hf, model_type='outside'))\n"
    )
    (tmp_path / "nemotron.py").write_bytes((EXAMPLE / "nemotron.py").read_bytes())
    sizes = {**SIZES, "num_key_value_heads": 1, "head_dim": 20}
    transformers.NemotronForCausalLM(transformers.NemotronConfig(**sizes)).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "outside"}))
    text = "model: {family: 'outside:FAMILY', from_hf: hf}\ncheckpoint: {init_from: hf}\n"
    (tmp_path / "run.yaml").write_text(f"base: tiny-llama\n{text}")
    options = ["train.steps=1", "device.name=cpu", "data.source=synthetic", "data.seq_len=64"]
    run = cli.run(["train", "run.yaml", *options], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    other = cli.run(["train", "run.yaml", "model.family=llama"], cwd=tmp_path)
    assert other.returncode == 2
    assert "model_type=outside: not supported; one of llama" in other.stderr


def family_with(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> models.ModelConfig:
    module = ModuleType("broken_family")
    module.FAMILY = replace(find_family(NAME), **changes)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "broken_family", module)
    find_family.cache_clear()
    example = {**configs.LLAMA, "family": "broken_family:FAMILY", "tie_embeddings": True}
    return configs.tiny_config(example).model


def test_module_and_blueprint_that_disagree_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    family: Family = find_family(NAME)
    extra = ParamSpec("layers.*.scale.weight", (3,))

    def more(c: Any) -> Any:
        table = family.blueprint(c)
        return replace(table, specs=(*table.specs, extra))

    def fewer(c: Any) -> Any:
        table = family.blueprint(c)
        return replace(table, specs=table.specs[:-1])

    def module(c: Any, make: Any) -> Any:
        model = models.rank_model.import_module_class(family.module)(c, make)
        model.norm.weight = nn.Parameter(Tensor(5))
        return model

    for changes, message in (
        ({"blueprint": more}, "its blueprint has layers.0.scale.weight, which its module has not"),
        ({"blueprint": fewer}, "its module has norm.bias, which its blueprint has not"),
        ({"module": module}, "norm.weight has the shape [5] in its module, [32] in its blueprint"),
    ):
        with pytest.raises(UserError, match=re.escape(f"model.family=broken_family:FAMILY: {message}")):
            models.build_model(family_with(monkeypatch, **changes))


def test_checkpoint_of_a_family_that_has_changed_is_not_called_corrupt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A key of another type, or a tensor of another name: every file is as it was written."""
    family: Family = find_family(NAME)
    before, after = (
        create_model("Changed", __base__=family.config_class, gain=(kind, value))
        for kind, value in ((float, 1.5), (int, 1))
    )

    def renamed(c: Any) -> Any:
        table = family.blueprint(c)
        specs = [replace(spec, name=spec.name.replace("mlp_norm", "second_norm")) for spec in table.specs]
        return replace(table, specs=tuple(specs))

    model = family_with(monkeypatch, config_class=before).model_dump(mode="json")
    section = {"every": 1, "export_hf": False}
    config = configs.tiny_config(model, train={"steps": 1}, checkpoint=section, log={"directory": str(tmp_path)})
    Trainer(config).run()
    step = tmp_path / "run" / "checkpoints" / "step_00000001"

    for changes, gain, problem in (
        ({"config_class": after}, 1, "model.gain=1.5: not a whole number"),
        (
            {"config_class": before, "blueprint": renamed},
            1.5,
            "model.family=broken_family:FAMILY: has no tensor layers.0.mlp_norm.weight, which the checkpoint has",
        ),
    ):
        family_with(monkeypatch, **changes)
        resume = {**section, "resume": "auto"}
        again = configs.tiny_config({**model, "gain": gain}, checkpoint=resume, log={"directory": str(tmp_path)})
        for act in (lambda config=again: Trainer(config), lambda: open_weights(step)):
            with pytest.raises(UserError) as error:
                act()
            assert str(error.value) == f"{step}: does not fit the installed code: {problem}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:FAMILY", "cannot import no_such_module: No module named 'no_such_module'; install it"),
        ("json:FAMILY", "expected a trainyard.Family as FAMILY in json, found nothing"),
        ("json:dumps", "expected a trainyard.Family as dumps in json, found a function"),
        ("lama", "not one of bert, "),
    ],
)
def test_unknown_families_are_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"model.family={name}: {message}")) as error:
        parse({"model": {**configs.LLAMA, "family": name}, "train": {"steps": 1}})
    assert "\n" not in str(error.value)

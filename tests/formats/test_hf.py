"""The exported weights of a run load in transformers with the same logits, and load here bit for bit."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support import configs
from tests.support.configs import tiny_batch
from trainyard import Trainer, load_model
from trainyard.checkpoint.weights import local_values
from trainyard.core.errors import UserError
from trainyard.families import find_family
from trainyard.families.blueprint import Blueprint, ParamSpec
from trainyard.families.builtin.llama import LlamaConfig
from trainyard.formats.hf import InMemoryWeights, open_hf, save_hf, write_hf
from trainyard.formats.nxd.layout import NxdLayout
from trainyard.formats.nxd.rank_files import write_nxd

AUTO = {
    "llama": transformers.AutoModelForCausalLM,
    "gpt": transformers.AutoModelForCausalLM,
    "bert": transformers.BertForPreTraining,
}


@pytest.mark.parametrize("family", configs.TINY_MODELS)
def test_a_finished_run_loads_in_transformers(family: str, tmp_path: Path) -> None:
    model = {**configs.TINY_MODELS[family], **({"tie_embeddings": False} if family == "llama" else {})}
    config = configs.tiny_config(model, checkpoint={"export_hf": True}, log={"directory": str(tmp_path)})
    trainer = Trainer(config)
    summary = trainer.run()
    reference = AUTO[family].from_pretrained(summary.exported_weights).eval()
    model_config, loaded = load_model(summary.exported_weights, "cpu")
    explicit_defaults = {
        key: getattr(model_config, key) for key in ("scaled_init", "ffn", "head_dim") if hasattr(model_config, key)
    }
    assert model_config == config.model.model_copy(update=explicit_defaults)
    batch = tiny_batch(family)
    batch["tokens"] = batch["tokens"] % 60 + 1
    tokens = batch["tokens"].long()
    if family == "bert":
        out = reference(
            input_ids=tokens, attention_mask=batch["attention_mask"], token_type_ids=batch["segment_ids"].long()
        )
        logits = out.prediction_logits.gather(1, batch["masked_positions"].long().unsqueeze(-1).expand(-1, -1, 128))
    else:
        logits = reference(input_ids=tokens).logits
    for model in (loaded, trainer.model.eval()):
        torch.testing.assert_close(model(batch).logits(), logits, atol=1e-5, rtol=1e-5)
    for name in trainer.optimizer.state.names:
        assert torch.equal(loaded.get_parameter(name), trainer.full_parameter(name))


def test_a_run_starts_from_a_directory(tmp_path: Path) -> None:
    """Continued pre-training: the first loss is that of the old weights, even with other fused matrices."""
    sections = {"log": {"directory": str(tmp_path)}, "optimizer": {"lr": 1e-2}, "train": {"steps": 20}}
    text = {"source": "text", "seq_len": 16}
    first = Trainer(configs.tiny_config(**sections, data=text, checkpoint={"export_hf": True})).run()
    unfused = {**configs.LLAMA, "fuse_qkv": False}
    continued = Trainer(
        configs.tiny_config(unfused, **sections, data=text, checkpoint={"init_from": str(first.exported_weights)})
    )
    batch = {**continued.loader.batch(0), "rng_key": torch.zeros(2, dtype=torch.int32)}
    total, count = continued.loss_fn.terms(continued.model(batch), batch)["lm"]
    _, model = load_model(first.exported_weights, "cpu")
    expected, _ = continued.loss_fn.terms(model(batch), batch)["lm"]
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert total / count < first.first_loss - 1
    with pytest.raises(UserError, match="not a known checkpoint format"):
        Trainer(configs.tiny_config(**sections, checkpoint={"init_from": str(tmp_path)}))


def test_sharded_directories_are_read(tmp_path: Path) -> None:
    model_config = configs.tiny_config().model
    model = configs.tiny_model(model_config)
    save_hf(tmp_path / "one", model_config, model.state_dict().__getitem__)
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    sharded = tmp_path / "two"
    sharded.mkdir()
    (sharded / "config.json").write_text((tmp_path / "one" / "config.json").read_text())
    file_of = {name: f"model-{i % 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    values = local_values(open_hf(sharded))
    for name, tensor in model.state_dict().items():
        assert torch.equal(values(name), tensor)


def test_saving_again_replaces_the_directory(tmp_path: Path) -> None:
    model_config = configs.tiny_config().model
    for seed in (0, 1):
        save_hf(tmp_path / "model", model_config, configs.tiny_model(model_config, seed).state_dict().__getitem__)
    values = local_values(open_hf(tmp_path / "model"))
    assert torch.equal(values("norm.weight"), configs.tiny_model(model_config, 1).state_dict()["norm.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_checkpoints_that_do_not_fit_are_refused_in_one_line(tmp_path: Path) -> None:
    model_config = configs.tiny_config().model
    save_hf(tmp_path / "model", model_config, configs.tiny_model(model_config).state_dict().__getitem__)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)

    def refused(message: str, **changes: torch.Tensor | None) -> None:
        new = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
        save_file(new, file)
        with pytest.raises(UserError, match=message) as error:
            open_hf(tmp_path / "model")
        assert "\n" not in str(error.value)

    refused("model.norm.weight is missing", **{"model.norm.weight": None})
    refused("extra is not a tensor of this model", extra=torch.zeros(1))
    refused(r"model.norm.weight is \[3\], expected \[32\]", **{"model.norm.weight": torch.zeros(3)})
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        open_hf(tmp_path / "model")
    file.unlink()
    with pytest.raises(UserError, match="no such file"):
        open_hf(tmp_path / "model")


def test_no_format_drops_a_parameter_that_it_has_no_name_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family with a parameter more than its name map, and than NxD's Llama, has."""
    family = find_family("llama")

    def blueprint(c: LlamaConfig) -> Blueprint:
        known = family.blueprint(c)
        return replace(known, specs=(*known.specs, ParamSpec("layers.*.attention.q_norm.weight", (c.head_size,))))

    module = ModuleType("family_with_q_norm")
    module.FAMILY = replace(family, blueprint=blueprint)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model = configs.tiny_config({**configs.LLAMA, "family": "family_with_q_norm:FAMILY"}).model
    assert isinstance(model, LlamaConfig)
    weights = InMemoryWeights(model, lambda name: torch.zeros(blueprint(model).spec(name).shape))
    missing = "have none for layers.0.attention.q_norm.weight, which would be lost"
    with pytest.raises(UserError, match=f"its Hugging Face names {missing}"):
        write_hf(tmp_path / "hf", weights)
    with pytest.raises(UserError, match=f"NxD's names {missing}"):
        write_nxd(tmp_path / "nxd", weights, NxdLayout(tp=2))
    assert list(tmp_path.iterdir()) == []

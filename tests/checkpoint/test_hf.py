"""What a run leaves behind loads in transformers with the same logits, and loads back here bit for bit."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support import configs
from tests.support.configs import tiny_batch
from trainyard import Trainer, load_model
from trainyard.checkpoint.formats.hf import open_hf, save_hf
from trainyard.checkpoint.formats.tensor_map import tp_rank_values
from trainyard.core.errors import UserError

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
    theirs = AUTO[family].from_pretrained(summary.exported_weights).eval()
    section, ours = load_model(summary.exported_weights, "cpu")
    spelt_out = {key: getattr(section, key) for key in ("scaled_init", "ffn", "head_dim") if hasattr(section, key)}
    assert section == config.model.model_copy(update=spelt_out)
    batch = tiny_batch(family)
    batch["tokens"] = batch["tokens"] % 60 + 1
    tokens = batch["tokens"].long()
    if family == "bert":
        out = theirs(
            input_ids=tokens, attention_mask=batch["attention_mask"], token_type_ids=batch["segment_ids"].long()
        )
        logits = out.prediction_logits.gather(1, batch["masked_positions"].long().unsqueeze(-1).expand(-1, -1, 128))
    else:
        logits = theirs(input_ids=tokens).logits
    for model in (ours, trainer.model.eval()):
        torch.testing.assert_close(model(batch).logits(), logits, atol=1e-5, rtol=1e-5)
    for name in trainer.optimizer.state.names:
        assert torch.equal(ours.get_parameter(name), trainer.full_parameter(name))


def test_a_run_starts_from_a_directory(tmp_path: Path) -> None:
    """Continued pre-training: the first loss is the old weights' loss, whatever is fused."""
    sections = {"log": {"directory": str(tmp_path)}, "optimizer": {"lr": 1e-2}, "train": {"steps": 20}}
    text = {"source": "text", "seq_len": 16}
    first = Trainer(configs.tiny_config(**sections, data=text, checkpoint={"export_hf": True})).run()
    changed = {**configs.LLAMA, "fuse_qkv": False}
    again = Trainer(
        configs.tiny_config(changed, **sections, data=text, checkpoint={"init_from": str(first.exported_weights)})
    )
    batch = {**again.loader.batch(0), "rng_key": torch.zeros(2, dtype=torch.int32)}
    total, count = again.loss_fn.terms(again.model(batch), batch)["lm"]
    _, model = load_model(first.exported_weights, "cpu")
    expected, _ = again.loss_fn.terms(model(batch), batch)["lm"]
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert total / count < first.first_loss - 1
    with pytest.raises(UserError, match="no checkpoint that is known"):
        Trainer(configs.tiny_config(**sections, checkpoint={"init_from": str(tmp_path)}))


def test_sharded_directories_are_read(tmp_path: Path) -> None:
    section = configs.tiny_config().model
    model = configs.tiny_model(section)
    save_hf(tmp_path / "one", section, model.state_dict().__getitem__)
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    sharded = tmp_path / "two"
    sharded.mkdir()
    (sharded / "config.json").write_text((tmp_path / "one" / "config.json").read_text())
    where = {}
    for number, name in enumerate(tensors):
        file = f"model-{number % 2 + 1:05d}-of-00002.safetensors"
        where[name] = file
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    values = tp_rank_values(open_hf(sharded))
    for name, tensor in model.state_dict().items():
        assert torch.equal(values(name), tensor)


def test_saving_again_replaces_whole(tmp_path: Path) -> None:
    section = configs.tiny_config().model
    for seed in (0, 1):
        save_hf(tmp_path / "model", section, configs.tiny_model(section, seed).state_dict().__getitem__)
    values = tp_rank_values(open_hf(tmp_path / "model"))
    assert torch.equal(values("norm.weight"), configs.tiny_model(section, 1).state_dict()["norm.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_checkpoints_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    section = configs.tiny_config().model
    save_hf(tmp_path / "model", section, configs.tiny_model(section).state_dict().__getitem__)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)

    def changed(words: str, **changes: torch.Tensor | None) -> None:
        new = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
        save_file(new, file)
        with pytest.raises(UserError, match=words) as caught:
            open_hf(tmp_path / "model")
        assert "\n" not in str(caught.value)

    changed("model.norm.weight is missing", **{"model.norm.weight": None})
    changed("extra has no place", extra=torch.zeros(1))
    changed(r"model.norm.weight is \[3\], wanted \[32\]", **{"model.norm.weight": torch.zeros(3)})
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        open_hf(tmp_path / "model")
    file.unlink()
    with pytest.raises(UserError, match="no such file"):
        open_hf(tmp_path / "model")

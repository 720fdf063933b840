"""model.new_tokens: the tokenizer gets special tokens, and the embeddings rows for them, as transformers makes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.formats.test_convert import convert
from tests.formats.test_megatron import GPT, random_weights
from tests.formats.test_megatron import write as write_megatron
from tests.formats.test_optimum import LLAMA
from tests.formats.test_optimum import write as write_optimum
from tests.formats.test_tokenizer_files import train_tokenizer
from tests.support import configs
from tests.support.hf_reference import hf_model
from trainyard import Trainer
from trainyard.checkpoint.weights import local_values
from trainyard.core.errors import UserError
from trainyard.core.splits import ModelShard
from trainyard.data.loading.build import grow_vocab
from trainyard.data.text.tokenizer import TokenizerSpec, load_tokenizer
from trainyard.families.hf_config import from_hf
from trainyard.formats.hf import hf_tensors
from trainyard.formats.registry import open_weights
from trainyard.models import blueprint_of

NEW = ("<|im_start|>", "<|im_end|>", "<tool>")
VOCAB, TOKENS = 300, 300
"""Rows of the embedding, and tokens of the tokenizer."""


def save_folder(directory: Path, variant: str, vocab: int = VOCAB, **changes: Any) -> Any:
    """A random transformers model and a tokenizer; returns the model."""
    hf = hf_model(variant, vocab_size=vocab, **changes)
    hf.save_pretrained(directory)
    fast = PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(), eos_token="<|endoftext|>")
    fast.save_pretrained(directory)
    assert len(fast) == TOKENS
    return hf


def grown(directory: Path, vocab: int = VOCAB + len(NEW)) -> Any:
    return from_hf(directory).model_copy(update={"vocab": vocab, "new_tokens": NEW})


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "qwen2", "gpt2", "gpt2-untied", "bert"])
def test_new_rows_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    hf = save_folder(tmp_path, variant)
    opened = open_weights(tmp_path, grown(tmp_path))
    assert f"model.vocab={VOCAB + 3}: rows {VOCAB} and up" in opened.notes[-1]
    hf.resize_token_embeddings(VOCAB + 3, mean_resizing=True)
    expected = hf.state_dict()
    ours = dict(hf_tensors(opened.weights))
    assert any(tensor.shape[0] == VOCAB + 3 for tensor in ours.values())
    for name, tensor in ours.items():
        # transformers draws new rows around the mean, with 1e-9 of the covariance.
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=lambda text, name=name: name + text)
        torch.testing.assert_close(tensor[:VOCAB], expected[name][:VOCAB], atol=0, rtol=0)


@pytest.mark.parametrize("target", ["native", "nxd", "dcp", "full"])
def test_new_rows_are_equal_from_every_format(target: str, tmp_path: Path) -> None:
    hf = save_folder(tmp_path / "hf", "llama")
    if target == "full":
        torch.save(hf.state_dict(), tmp_path / "hf" / "all.pt")
        other = tmp_path / "hf" / "all.pt"
    else:
        layouts = {"native": "tp=2", "nxd": "tp=2"}
        other = convert(tmp_path / "hf", tmp_path / "other", target, layouts.get(target, ""))
    expected = dict(hf_tensors(open_weights(tmp_path / "hf", grown(tmp_path / "hf")).weights))
    found = dict(hf_tensors(open_weights(other, grown(tmp_path / "hf")).weights))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("write", "model"), [(write_megatron, GPT.model_copy(update={"vocab": 256})), (write_optimum, LLAMA)]
)
def test_new_rows_of_shards_of_other_systems(write: Any, model: Any, tmp_path: Path) -> None:
    unfused = random_weights(model)
    path = write(tmp_path / "shards", model, unfused, 2)
    opened = open_weights(path, model.model_copy(update={"vocab": model.vocab + 3, "new_tokens": NEW}))
    rows = local_values(opened.weights)("embedding.weight")
    expected = unfused["embedding.weight"]
    assert torch.equal(rows[: model.vocab], expected)
    torch.testing.assert_close(rows[model.vocab :], expected.mean(0).expand(3, -1))


def test_ranks_read_their_rows_of_the_grown_matrix(tmp_path: Path) -> None:
    """Also where a rank's rows are old, new and padding."""
    save_folder(tmp_path, "llama")
    model = grown(tmp_path)
    weights = open_weights(tmp_path, model).weights
    full = local_values(weights)("embedding.weight")
    shards = [local_values(weights, ModelShard(tp=4, tp_rank=rank))("embedding.weight") for rank in range(4)]
    assert blueprint_of(model).local_shape("embedding.weight", ModelShard(tp=4, tp_rank=3))[0] == 76
    assert torch.equal(torch.cat(shards)[: VOCAB + 3], full)


def test_free_rows_come_first(tmp_path: Path) -> None:
    """Padded embeddings, as Qwen has them: rows stay as they are, and only what does not fit is new."""
    save_folder(tmp_path, "llama", vocab=TOKENS + 2)
    sections: dict[str, Any] = {"data": {"source": "text", "paths": ["x"], "tokenizer": str(tmp_path)}}
    model = json.loads(from_hf(tmp_path).model_dump_json())
    for tokens, vocab in ((NEW[:2], TOKENS + 2), (NEW, TOKENS + 3), (["<|endoftext|>", NEW[0]], TOKENS + 2)):
        config = grow_vocab(configs.tiny_config({**model, "new_tokens": tokens}, **sections))
        assert config.model.vocab == vocab
        assert grow_vocab(config) == config
        weights = open_weights(tmp_path, config.model).weights
        stored = local_values(open_weights(tmp_path).weights)("embedding.weight")
        assert torch.equal(local_values(weights)("embedding.weight")[: TOKENS + 2], stored)


@pytest.mark.parametrize("from_weights", [True, False])
def test_a_run_trains_and_exports_the_grown_model(from_weights: bool, tmp_path: Path) -> None:
    hf = save_folder(tmp_path / "hf", "llama-tied")
    (tmp_path / "text.txt").write_text("<|im_start|>a text<|im_end|> " * 200)
    model = {**json.loads(from_hf(tmp_path / "hf").model_dump_json()), "new_tokens": list(NEW)}
    checkpoint = {"export_hf": True, "every": 1, **({"init_from": str(tmp_path / "hf")} if from_weights else {})}
    data = {"source": "text", "paths": [str(tmp_path / "text.txt")], "tokenizer": str(tmp_path / "hf")}
    sections: dict[str, Any] = {"checkpoint": checkpoint, "data": data, "log": {"directory": str(tmp_path)}}
    sections["optimizer"] = {"lr": 1e-9, "weight_decay": 0.0}
    trainer = Trainer(configs.tiny_config(model, **sections, train={"steps": 1}))
    ids = [TOKENS, TOKENS + 1]
    assert set(ids) <= set(trainer.loader.batch(0)["tokens"].flatten().tolist())
    summary = trainer.run()
    tokenizer = AutoTokenizer.from_pretrained(summary.exported_weights)
    assert tokenizer("<|im_start|><|im_end|><tool>")["input_ids"] == [TOKENS, TOKENS + 1, TOKENS + 2]
    assert tokenizer.decode([TOKENS, 5], skip_special_tokens=True) == tokenizer.decode([5])
    exported = AutoModelForCausalLM.from_pretrained(summary.exported_weights)
    rows = exported.get_input_embeddings().weight
    assert exported.config.vocab_size == len(rows) == TOKENS + 3
    if from_weights:
        old = hf.get_input_embeddings().weight
        torch.testing.assert_close(rows[TOKENS:], old.mean(0).expand(3, -1), atol=1e-6, rtol=0)
    # The run resumes, with the vocabulary of its checkpoint.
    sections["checkpoint"] = {"resume": "auto", "export_hf": True}
    assert Trainer(configs.tiny_config(model, **sections, train={"steps": 2})).run().steps == 2


def test_every_kind_of_tokenizer_gets_the_tokens_once() -> None:
    tokenizer = load_tokenizer(TokenizerSpec("bytes", new_tokens=("<a>", "<b>")))
    assert tokenizer.vocab_size == 259
    assert tokenizer.encode(["x<b><a>"])[0].tolist() == [120, 258, 257]
    assert {257, 258} <= tokenizer.special_ids


def test_mistakes(tmp_path: Path) -> None:
    config = configs.tiny_config({**configs.LLAMA, "new_tokens": ["<a>"]}, data={"source": "synthetic"})
    with pytest.raises(UserError, match=r"tokenizer of data\.source=synthetic is not known; set data\.tokenizer"):
        grow_vocab(config)
    with pytest.raises(UserError, match="new_tokens"):
        configs.tiny_config({**configs.LLAMA, "new_tokens": [""]})
    save_folder(tmp_path, "llama")
    torch.save(hf_model("llama").state_dict(), tmp_path.parent / "alone.pt")
    with pytest.raises(UserError, match=r"does not store the model's configuration; .*config\.json"):
        open_weights(tmp_path.parent / "alone.pt", grown(tmp_path))

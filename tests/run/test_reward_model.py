"""A reward model: starts from a causal model, is exported as that of transformers, and scores as it does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, LlamaForSequenceClassification

from tests.support import configs
from trainyard import Trainer
from trainyard.config.load import parse
from trainyard.core.errors import UserError
from trainyard.formats.registry import open_weights
from trainyard.inference.load import InferenceOptions, load_for_inference
from trainyard.run.records import RunSummary
from trainyard.train.pair_loss import PairLoss

PAIRS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a + b + 7}!"} for a in range(4) for b in range(3)]
PAD = 259


def configure(tmp_path: Path, name: str, model: Any = None, **sections: Any) -> Any:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    default: dict[str, Any] = {
        "data": {"source": "preference", "paths": str(file), "seq_len": 32, "tokenizer": "bytes"},
        "train": {"steps": 4, "global_batch": 4, "micro_batch": 2, "objective": "reward"},
        "log": {"directory": str(tmp_path / "runs"), "name": name, "every": 1},
        "checkpoint": {"export_hf": True, "every": 4},
    }
    merged = {key: default.get(key, {}) | sections.get(key, {}) for key in default | sections}
    return configs.tiny_config(model or {**configs.LLAMA, "pad_token_id": PAD}, **merged)


def trained(tmp_path: Path, name: str = "run", **options: Any) -> tuple[Trainer, RunSummary]:
    trainer = Trainer(configure(tmp_path, name, **options))
    return trainer, trainer.run()


def scores_of(trainer: Trainer) -> tuple[list[list[int]], list[float]]:
    """The answers of a batch with their prompts, and the scores that the run's model gives them."""
    batch = trainer.loader.batch(0)
    assert isinstance(trainer.loss_fn, PairLoss)
    with torch.no_grad():
        found = trainer.loss_fn.scores(trainer.model.eval()(batch), batch)
    answers, scores = [], []
    for row, documents in enumerate(batch["document_ids"]):
        for document, score in enumerate((found.chosen[row, 0], found.rejected[row, 0])):
            answers.append(batch["tokens"][row][documents == document].tolist())
            scores.append(float(score))
    return answers, scores


def test_transformers_gives_the_scores_of_an_exported_model(tmp_path: Path) -> None:
    """In one batch with padding, whose token an answer does not have."""
    trainer, summary = trained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(summary.exported_weights)
    assert isinstance(model, LlamaForSequenceClassification)
    assert (model.config.num_labels, model.config.pad_token_id) == (1, PAD)
    answers, scores = scores_of(trainer)
    longest = max(map(len, answers))
    padded = torch.tensor([[*answer, *[PAD] * (longest - len(answer))] for answer in answers])
    with torch.no_grad():
        found = model(input_ids=padded, attention_mask=padded != PAD).logits[:, 0]
    assert found.tolist() == pytest.approx(scores, abs=1e-5)
    assert max(scores) - min(scores) > 1e-3


def test_an_exported_model_is_read_back(tmp_path: Path) -> None:
    trainer, summary = trained(tmp_path)
    exported = str(summary.exported_weights)
    again = Trainer(parse_again(tmp_path, exported))
    assert scores_of(again) == scores_of(trainer)
    assert not open_weights(exported, again.config.model).notes


def parse_again(tmp_path: Path, weights: str) -> Any:
    config = configure(tmp_path, "again", checkpoint={"init_from": weights}).model_dump(mode="json")
    return parse({**config, "model": {"from_hf": weights}} | {"lora": None})


def test_a_causal_model_gets_a_new_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its other weights are those of the model; the embedding is no head any more."""
    causal = {**configs.LLAMA, "tie_embeddings": True}
    checkpoint = {"export_hf": True, "every": 4}
    start = Trainer(configs.tiny_config(causal, log={"directory": str(tmp_path)}, checkpoint=checkpoint)).run()
    for source in (start.exported_weights, start.directory):
        config = configure(tmp_path, "reward", causal, checkpoint={"init_from": str(source)})
        trainer = Trainer(config)
        assert "score.weight is new, with random values" in caplog.text
        caplog.clear()
        weights = open_weights(str(source)).weights
        for name, parameter in trainer.model.named_parameters():
            if name in ("embedding.weight", "norm.weight"):
                (piece,) = trainer.blueprint.local_slices(name)
                assert torch.equal(parameter, weights.read(piece)), name
        assert not any(name.startswith("output") for name, _ in trainer.model.named_parameters())
        assert float(trainer.model.score.weight.detach().std()) == pytest.approx(config.model.init_std, rel=0.5)


def test_with_adapters_the_head_is_trained(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path, lora={"rank": 2}, checkpoint={"export_hf": False})
    names = [name for name in trainer.blueprint.trained_names() if "lora" not in name]
    assert names == ["score.weight"]


def test_a_reward_model_writes_no_text(tmp_path: Path) -> None:
    _, summary = trained(tmp_path)
    for source in (summary.directory, summary.exported_weights):
        with pytest.raises(UserError, match="a reward model scores answers and does not generate"):
            load_for_inference(str(source), InferenceOptions(device="cpu"))
    with pytest.raises(UserError, match=r"samples.every=2: a reward model writes no text; nearest: 0"):
        configure(tmp_path, "samples", samples={"every": 2})
    with pytest.raises(UserError, match=r"train.objective=dpo: model.score_head=true is a reward model"):
        configure(tmp_path, "dpo", {**configs.LLAMA, "score_head": True}, train={"objective": "dpo"})


def test_only_one_label_is_a_reward(tmp_path: Path) -> None:
    _, summary = trained(tmp_path)
    assert AutoConfig.from_pretrained(summary.exported_weights).id2label == {0: "LABEL_0"}
    path = Path(str(summary.exported_weights)) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": {"0": "bad", "1": "good"}}))
    with pytest.raises(UserError, match="num_labels=2: a reward model has one; nearest: 1"):
        open_weights(str(summary.exported_weights))

"""Complete runs against plain torch on transformers models: every step's loss, learning rate and gradient norm, dropout
in training, no dropout in evaluation, and a user's loss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.support import configs
from tests.support.hf_reference import hf_reference
from trainyard import Trainer
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.run.records import RunSummary

STEPS, WARMUP = 20, 5
OPTIMIZER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}


def configure(model: dict[str, Any] | str, tmp_path: Path, **sections: dict[str, Any]) -> Config:
    return configs.tiny_config(model, **{"log": {"directory": str(tmp_path)}, **sections})


def records(summary: RunSummary, key: str = "loss") -> list[dict[str, Any]]:
    lines = map(json.loads, (summary.directory / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if key in line]


def values(summary: RunSummary, key: str) -> list[float]:
    return [record[key] for record in records(summary, key)]


def torch_training(
    model: nn.Module, batches: list[dict[str, Tensor]], config: Config
) -> tuple[list[float], list[float], list[float]]:
    """Losses, learning rates and gradient norms of a plain loop around torch's AdamW and transformers' schedule."""
    section, parameters = config.optimizer, list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=section.lr, betas=(section.beta1, section.beta2), eps=section.eps)
    schedule = transformers.get_cosine_schedule_with_warmup(adamw, config.schedule.warmup_steps, config.train.steps)
    model.train()
    losses, rates, norms = [], [], []
    for step, batch in enumerate(batches, start=1):  # transformers itself counts from 0, so its first rate is 0
        rates.append(section.lr * schedule.lr_lambdas[0](step))
        for group in adamw.param_groups:
            group["lr"] = rates[-1]
        logits = model(input_ids=batch["tokens"].long()).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].long().flatten())
        adamw.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, section.max_grad_norm)
        adamw.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, rates, norms


@pytest.mark.parametrize(("variant", "max_grad_norm"), [("llama-gqa", 1.9), ("gpt2", 1.2)])
def test_loss_lr_and_grad_norm_of_20_steps_equal_plain_torch(
    variant: str, max_grad_norm: float, tmp_path: Path
) -> None:
    """Guards the numbering of learning rates, clipping, weight decay and the mean over micro batches."""
    _, model, _ = hf_reference(variant)
    model.save_pretrained(tmp_path / "start")
    config = parse(
        {
            "model": {"from_hf": str(tmp_path / "start")},
            "data": {"source": "synthetic", "seq_len": 16},
            "train": {"steps": STEPS, "global_batch": 4, "micro_batch": 2},
            "optimizer": {**OPTIMIZER, "max_grad_norm": max_grad_norm},
            "schedule": {"kind": "cosine", "warmup_steps": WARMUP},
            "checkpoint": {"init_from": str(tmp_path / "start"), "export_hf": False},
            "log": {"every": 1, "loggers": [], "directory": str(tmp_path)},
            "device": {"name": "cpu"},
        }
    )
    trainer = Trainer(config)
    batches = [trainer.loader.batch(step) for step in range(STEPS)]
    losses, rates, norms = torch_training(model, batches, config)
    summary = trainer.run()
    assert min(norms) < max_grad_norm < max(norms)  # some steps are clipped, some are not
    assert values(summary, "lr") == pytest.approx(rates, rel=1e-9, abs=1e-12)
    assert values(summary, "loss") == pytest.approx(losses, rel=1e-4)
    assert values(summary, "grad_norm") == pytest.approx(norms, rel=2e-3)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dropout_differs_between_steps_on_one_batch(dropout: float, tmp_path: Path) -> None:
    """Guards against one dropout mask for all steps: the data is one sample, and the rate too small to learn."""
    (tmp_path / "data.txt").write_text("sixteen letters!")
    model = {**configs.GPT, "embedding_dropout": dropout, "hidden_dropout": dropout, "attention_dropout": dropout}
    summary = Trainer(
        configure(
            model,
            tmp_path,
            data={"source": "text", "paths": [str(tmp_path / "data.txt")]},
            train={"steps": 4, "global_batch": 1, "micro_batch": 1},
            optimizer={"lr": 1e-30, "weight_decay": 0},
        )
    ).run()
    assert len(set(values(summary, "loss"))) == (4 if dropout else 1)


def test_evaluation_of_a_dropout_model_equals_eval_mode_of_transformers(tmp_path: Path) -> None:
    """Guards against dropout in evaluation, and against training without dropout after an evaluation."""
    model = {**configs.GPT, "embedding_dropout": 0.3, "hidden_dropout": 0.3, "attention_dropout": 0.3}
    sections: dict[str, Any] = {"data": {"validation_fraction": 2e-6}, "checkpoint": {"export_hf": True}}
    config = configure(model, tmp_path, **sections, evaluate={"every": 1, "batches": 100})
    trainer = Trainer(config)
    summary = trainer.run()
    assert summary.exported_weights
    held_out = trainer.validation_loaders[""].dataset
    samples = held_out.samples(torch.arange(len(held_out)).numpy())
    tokens, labels = (torch.from_numpy(samples[name].copy()).long() for name in ("tokens", "labels"))
    reference = transformers.GPT2LMHeadModel.from_pretrained(summary.exported_weights).eval()
    with torch.no_grad():
        loss = F.cross_entropy(reference(input_ids=tokens).logits.flatten(0, 1), labels.flatten())
    assert summary.evaluation["loss"] == pytest.approx(loss.item(), rel=1e-5)
    unevaluated = Trainer(configure(model, tmp_path, **sections)).run()
    assert values(unevaluated, "loss") == values(summary, "loss")


def test_user_loss_is_divided_by_its_count_even_below_one(tmp_path: Path) -> None:
    """Weights of 1e-6 per label leave a mean unchanged, in training, in its gradients and in evaluation."""

    def weighted(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        labels = batch["labels"].long().flatten()
        loss = F.cross_entropy(output.logits().flatten(0, -2).float(), labels, reduction="sum")
        return 1e-6 * loss, 1e-6 * (labels != -100).sum()

    sections: dict[str, Any] = {"optimizer": {"max_grad_norm": 0}, "evaluate": {"every": 4, "batches": 2}}
    config = configure("llama", tmp_path, data={"validation_fraction": 2e-6}, **sections)
    plain, own = Trainer(config).run(), Trainer(config, loss=weighted).run()
    for key in ("loss", "grad_norm", "evaluate/loss"):
        assert values(own, key) == pytest.approx(values(plain, key), rel=1e-5), key

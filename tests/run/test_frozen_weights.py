"""Weights that are not trained: they keep their bits, have no optimizer state and are not saved. Resumed runs and
readers of checkpoints find them where the run found them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import configs
from tests.support.frozen_linear import frozen
from trainyard import Trainer
from trainyard.checkpoint.weights import frozen_tensors, local_values, unfused_tensors
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.formats.convert import ConversionTarget, convert_checkpoint, first_different_tensor
from trainyard.formats.registry import open_weights
from trainyard.models.init import initial_values

MODEL = frozen(configs.LLAMA, lr_scale=2.0)


def configure(tmp_path: Path, model: dict[str, Any] = MODEL, **sections: dict[str, Any]) -> Config:
    base: dict[str, Any] = {
        "optimizer": {"lr": 1e-2},
        "checkpoint": {"every": 2, "export_hf": False, "keep": 0},
        "log": {"directory": str(tmp_path / "runs")},
    }
    return configs.tiny_config(
        model, **{name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    )


def train(config: Config, **arguments: Any) -> Trainer:
    trainer = Trainer(config, **arguments)
    trainer.run()
    return trainer


def checkpoint_path(trainer: Trainer, step: int) -> Path:
    return trainer.run_directory.path / "checkpoints" / f"step_{step:08d}"


def full_weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: trainer.full_parameter(name).clone() for name in trainer.blueprint.parameter_names()}


def different_weights(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_sr"])
def test_frozen_weights_keep_their_bits(tmp_path: Path, precision: str) -> None:
    config = configure(tmp_path, precision={"kind": precision}, checkpoint={"every": 0})
    trainer = train(config)
    blueprint, state = trainer.blueprint, trainer.optimizer.state
    initial = initial_values(blueprint, config.train.seed)
    for name, parameter in trainer.model.named_parameters():
        is_trained = blueprint.is_trained(name)
        assert torch.equal(parameter, initial(name).to(parameter.dtype)) != is_trained, name
        assert parameter.requires_grad == is_trained
        assert is_trained or parameter.grad is None
    count = blueprint.trained_count
    assert 0 < count < blueprint.parameter_count()
    for buffer in (state.master_weights, state.gradients, state.exp_avg, state.exp_avg_sq):
        assert count <= buffer.numel() < count * 1.05
    assert blueprint.parameter_count() - count <= state.frozen_weights.numel()
    assert state.frozen_weights.dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)


def test_checkpoint_holds_trained_weights(tmp_path: Path) -> None:
    trainer = train(configure(tmp_path))
    manifest = json.loads((checkpoint_path(trainer, 4) / "complete.json").read_text().splitlines()[0])
    saved = {name for file in manifest["files"].values() for name, *_ in file["boxes"]}
    assert saved == unfused_tensors(trainer.config.model).keys() - frozen_tensors(trainer.config.model)


@pytest.mark.parametrize("from_weights", [False, True], ids=["from a seed", "from weights"])
def test_resume_finds_weights_that_are_not_saved(tmp_path: Path, from_weights: bool) -> None:
    source: dict[str, Any] = {}
    if from_weights:
        plain = train(configure(tmp_path, configs.LLAMA, checkpoint={"export_hf": True}, train={"seed": 5}))
        source = {"init_from": str(plain.run_directory.path / "model")}
    whole = train(configure(tmp_path, checkpoint=source))
    # A configuration that resumes from a path need not name the source, and a run may be resumed more than once.
    first = train(configure(tmp_path, checkpoint={"resume": str(checkpoint_path(whole, 2)), "every": 1}))
    second = train(configure(tmp_path, checkpoint={"resume": str(checkpoint_path(first, 3))}))
    assert (first.losses, second.losses) == (whole.losses[2:], whole.losses[3:])
    assert different_weights(full_weights(second), full_weights(whole)) == []


def test_resume_with_weights_of_the_caller(tmp_path: Path) -> None:
    values = initial_values(Trainer(configure(tmp_path)).blueprint, seed=77)
    whole = train(configure(tmp_path), weights=values)
    resume = {"resume": str(checkpoint_path(whole, 2))}
    resumed = train(configure(tmp_path, checkpoint=resume), weights=values)
    assert resumed.losses == whole.losses[2:]
    with pytest.raises(UserError, match="holds trained weights only; pass Trainer the other weights again"):
        Trainer(configure(tmp_path, checkpoint=resume))


def test_checkpoint_opens_as_weights(tmp_path: Path) -> None:
    plain = train(configure(tmp_path, configs.LLAMA, checkpoint={"export_hf": True}, train={"seed": 5}))
    base, moved = plain.run_directory.path / "model", tmp_path / "moved"
    trainer = train(configure(tmp_path, checkpoint={"init_from": str(base)}))
    expected, path = full_weights(trainer), checkpoint_path(trainer, 4)
    opened = open_weights(path)
    for target in (ConversionTarget("native", {"tp": 2}), ConversionTarget("native", {}, weights_only=True)):
        directory = tmp_path / f"converted-{target.weights_only}"
        convert_checkpoint(opened, path, directory, target, lambda count: None)
        converted = open_weights(directory)
        assert first_different_tensor(opened, converted, target) is None
        values = local_values(converted.weights)
        assert different_weights({name: values(name) for name in expected}, expected) == []
    # One with the optimizer's state resumes, at the layout that it was converted to or any other.
    resumed = train(configure(tmp_path, checkpoint={"resume": str(tmp_path / "converted-False")}, train={"steps": 5}))
    assert len(resumed.losses) == 1

    shutil.move(base, moved)
    opened = open_weights(path)
    with pytest.raises(UserError, match=f"{path}: holds trained weights only; of the others: {base}: no such file"):
        local_values(opened.weights)("norm.weight")
    with pytest.raises(UserError, match=f"{base}: no such file"):
        Trainer(configure(tmp_path, checkpoint={"resume": str(path)}, train={"steps": 5}))
    resume = {"resume": str(path), "init_from": str(moved)}
    again = train(configure(tmp_path, checkpoint=resume, train={"steps": 5}))
    assert again.losses == resumed.losses

"""Frozen weights in 4 and 8 bits: the bytes that a run has, what it gathers, resuming, and what a plan says of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import configs
from trainyard import Trainer
from trainyard.config.schema import Config
from trainyard.devices.kind import DeviceKind
from trainyard.families import blueprint_of
from trainyard.kernels.frozen_linear import dequantize, quantize_frozen
from trainyard.kernels.nf4 import quantize_nf4
from trainyard.models.init import initial_values
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.memory.optimizer_state import OptimizerMemory
from trainyard.preflight.plan.planned_run import PlannedRun

MODEL = {**configs.LLAMA, "hidden": 128, "ffn": 256, "heads": 4, "kv_heads": 2}


def configure(tmp_path: Path, base: str, model: dict[str, Any] = MODEL, **sections: Any) -> Config:
    return configs.tiny_config(
        model,
        lora={"rank": 4, "base": base},
        precision={"kind": "bf16"},
        log={"directory": str(tmp_path / "runs")},
        **{"checkpoint": {"every": 2, "keep": 0, "export_hf": False}, **sections},
    )


def train(config: Config) -> Trainer:
    trainer = Trainer(config)
    trainer.run()
    return trainer


def bytes_of(tensors: Any) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(("base", "bits"), [("nf4", 4.13), ("fp8", 8.0)])
def test_bytes_of_a_run(tmp_path: Path, base: str, bits: float) -> None:
    """The stored form and nothing else: no matrix in the compute dtype anywhere in the model or the state."""
    wide = {**MODEL, "hidden": 512, "ffn": 1024, "heads": 4}
    config = configure(tmp_path, base, wide, checkpoint={})
    trainer = Trainer(config)
    state, blueprint = trainer.optimizer.state, trainer.blueprint
    count = blueprint.parameter_count(lambda spec: bool(spec.storage))
    stored = bytes_of(tensor for matrix in state.stored.values() for tensor in matrix)
    plan = OptimizerMemory(PlannedRun(config, trainer.layout, DeviceKind("", 0)), trainer.layout.stages_on(0))
    assert stored == plan.stored_bytes
    assert 8 * stored / count == pytest.approx(bits, rel=0.02)
    resident = [tensor for tensor in (*trainer.model.buffers(), *trainer.model.parameters()) if not tensor.is_meta]
    frozen = blueprint.parameter_count(lambda spec: not (spec.trained or spec.storage))
    assert bytes_of(resident) < stored + 2.1 * (frozen + blueprint.trained_count)
    assert state.frozen_weights.numel() < 1.01 * frozen
    assert plan.resident.weights == stored + bytes_of([state.frozen_weights, state.weights])


@pytest.mark.parametrize("base", ["nf4", "fp8"])
def test_gathered_weights_are_those_of_the_unfused_parts(tmp_path: Path, base: str) -> None:
    trainer = Trainer(configure(tmp_path, base, checkpoint={}))
    initial = initial_values(trainer.blueprint, trainer.config.train.seed)
    name = "layers.1.attention.qkv.weight"
    weight = initial(name).bfloat16()

    def round_trip(part: Tensor) -> Tensor:
        return dequantize(quantize_nf4(part) if base == "nf4" else quantize_frozen(part, "tensor"), torch.bfloat16)

    parts = weight.split([128, 64, 64]) if base == "nf4" else [weight]
    expected = torch.cat([round_trip(part) for part in parts])
    assert torch.equal(trainer.full_parameter(name), expected)
    assert base == "fp8" or not torch.equal(expected, round_trip(weight))


@pytest.mark.parametrize("base", ["nf4", "fp8"])
def test_resumed_run_is_the_uninterrupted_one(tmp_path: Path, base: str) -> None:
    whole = train(configure(tmp_path, base))
    path = whole.run_directory.path / "checkpoints" / "step_00000002"
    resumed = train(configure(tmp_path, base, checkpoint={"resume": str(path), "export_hf": False}))
    assert resumed.losses == whole.losses[2:]
    assert (whole.losses[0] > 0, len(whole.losses)) == (True, 4)
    for name, matrix in whole.optimizer.state.stored.items():
        pairs = zip(matrix, resumed.optimizer.state.stored[name], strict=True)
        assert all(torch.equal(a.float(), b.float()) for a, b in pairs)
    for name in whole.blueprint.trained_names():
        assert torch.equal(whole.full_parameter(name), resumed.full_parameter(name))


def test_plan_of_8b_in_nf4() -> None:
    """4.13 bits for each weight of the 224 matrices, 2 bytes for the embedding and the head."""
    model = {
        "family": "llama", "vocab": 128_256, "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14_336,
        "max_positions": 8192,
    }  # fmt: skip
    config = configs.tiny_config(model, lora={"base": "nf4"}, precision={"kind": "bf16"})
    blueprint = blueprint_of(config.model)
    layout = Layout.from_config(config, 1)
    memory = OptimizerMemory(PlannedRun(config, layout, DeviceKind("", 0)), layout.stages_on(0))
    count = blueprint.parameter_count(lambda spec: bool(spec.storage))
    assert count == 32 * 218_103_808
    assert 8 * memory.stored_bytes / count == pytest.approx(4.13, abs=0.01)
    assert memory.resident.weights < 6e9

"""A checkpoint of the repository, which guards the format: a run resumes from it, and it is converted."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.saved_runs import run_training
from tests.distributed.rank_jobs import LossRecorder
from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.checkpoint.weights import unfused_tensors
from trainyard.config.schema import Config
from trainyard.formats.convert import ConversionTarget, convert_checkpoint
from trainyard.formats.registry import open_weights
from trainyard.remote.storage import open_storage

STORED = Path(__file__).parent / "data" / "stored" / "step_00000002"
LOSSES = [3.154975414276123, 3.1878228187561035]
"""Losses of steps 3 and 4 of the run that wrote the checkpoint."""


def stored_config() -> Config:
    with Checkpoint(open_storage(STORED)) as checkpoint:
        checkpoint.verify(checkpoint.files)
        return checkpoint.config


def test_configuration_is_read() -> None:
    config = stored_config()
    assert (config.data.seq_len, config.optimizer.max_grad_norm, config.schedule.warmup_steps) == (8, 0.5, 2)
    assert config.model.tie_embeddings  # type: ignore[union-attr]


def test_a_run_resumes_with_the_same_losses(tmp_path: Path) -> None:
    data = stored_config().model_dump(mode="json")
    data["checkpoint"] |= {"resume": str(STORED), "every": 0}
    data["log"] |= {"directory": str(tmp_path)}
    recorder = LossRecorder()
    _, messages = run_training(Config.model_validate(data), [recorder])
    assert recorder.losses == pytest.approx(LOSSES, rel=1e-5)
    assert f"resuming from step 2: {STORED}" in messages
    assert not [line for line in messages if line.startswith("note:")]  # no key seems to have changed


@pytest.mark.parametrize("layout", [{}, {"tp": 1, "pp": 2, "dp": 2}])
def test_all_tensors_are_converted(layout: dict[str, int], tmp_path: Path) -> None:
    opened = open_weights(STORED)
    convert_checkpoint(opened, STORED, tmp_path / "out", ConversionTarget("native", layout), lambda count: None)
    stored = load_file(STORED / "rank_00000.safetensors")
    with Checkpoint(open_storage(tmp_path / "out")) as converted:
        assert (converted.step, converted.manifest["updates"]) == (2, 2)
        for kind in ("weights", "first", "second"):
            for name, tensor in unfused_tensors(converted.model).items():
                assert torch.equal(converted.read_state(kind, tensor), stored[f"{kind}.{name}"]), (kind, name)

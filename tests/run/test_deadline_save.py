"""A signal during a step that does not end: the step before it is saved, and the run continues with the same losses."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.support.forkserver import ForkedProcess, ForkServer

STEPS = 6
USER_CODE = """
import os
import time

import torch

calls = 0
torch.manual_seed(int(os.environ.get("RANK", "0")))


def loss(output, batch):
    global calls
    calls += 1
    if calls == int(os.environ.get("STOP_AT_CALL", "0")) and os.environ.get("RANK", "0") == os.environ["STOP_RANK"]:
        open("stopped", "w").close()
        time.sleep(600)
    logits, labels = output.logits().flatten(0, 1), batch["labels"].long().flatten()
    noise = 1 + 0.1 * torch.rand(())  # the random generators of a resumed run must be those of the saved step
    return noise * torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), labels.numel()
"""
TRAIN = ["tiny-llama", "--smoke", "checkpoint.export_hf=false", "log.loggers=[]", "evaluate.every=0"]
TRAIN += ["train.loss=mine:loss", f"train.steps={STEPS}", "train.global_batch=4", "train.micro_batch=1", "log.every=1"]
TRAIN += ["checkpoint.every=1000", "checkpoint.stop_grace_s=0.5", "log.directory=runs"]


def curve(run: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def wait_for(path: Path, process: ForkedProcess) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("ranks", "stop_rank", "stop_at_call", "saved_step"),
    [
        pytest.param(2, 1, 8, 3, id="two ranks"),
        pytest.param(1, 0, 11, 2, id="one rank", marks=pytest.mark.nightly),
        pytest.param(1, 0, 1, 0, id="before the first step ends", marks=pytest.mark.nightly),
    ],
)
def test_step_before_is_saved(
    cli: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    stop_rank: int,
    stop_at_call: int,
    saved_step: int,
) -> None:
    (tmp_path / "mine.py").write_text(USER_CODE)
    command = ["train", *TRAIN, "--nproc", str(ranks)]
    assert cli.run([*command, "log.name=undisturbed"], cwd=tmp_path).returncode == 0
    monkeypatch.setenv("STOP_RANK", str(stop_rank))
    monkeypatch.setenv("STOP_AT_CALL", str(stop_at_call))
    process = cli.start([*command, "log.name=mine"], cwd=tmp_path)
    wait_for(tmp_path / "stopped", process)
    time.sleep(0.2)  # the other rank reaches its collective
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert f"stopped inside step {saved_step + 1}" in output + errors
    saved = list((tmp_path / "runs/mine/checkpoints").glob("step_*"))
    assert [path.name for path in saved] == ([f"step_{saved_step:08d}"] if saved_step else [])
    monkeypatch.delenv("STOP_AT_CALL")
    done = cli.run(["train", "runs/mine", "--continue", "--nproc", str(ranks)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert curve(tmp_path / "runs/mine") == curve(tmp_path / "runs/undisturbed")

"""A run that failed says so in one line and with an exit code: non-finite settings and steps, broken user modules, a
full disk."""

import json
import os
import threading
from pathlib import Path

import pytest

from tests.cli.conftest import Call, fail, succeed
from tests.support import configs
from tests.support.forkserver import ForkServer
from trainyard import Trainer
from trainyard.launch.rank_guard import LAUNCHER_ENV

SMALL = ["--smoke", "log.loggers=[]", "evaluate.every=0", "device.name=cpu"]
LOSS = """
import torch.nn.functional as F

calls = 0

def loss(output, batch):
    global calls
    calls += 1
    labels = batch["labels"].long().flatten()
    total = F.cross_entropy(output.logits().flatten(0, -2).float(), labels, reduction="sum")
    return total * (float("nan") if calls == 3 else 1), labels.numel()
"""


@pytest.mark.parametrize("value", [".inf", ".nan"])
@pytest.mark.parametrize(
    "key",
    [
        "optimizer.lr",
        "optimizer.weight_decay",
        "optimizer.eps",
        "model.init_std",
        "model.norm_eps",
        "model.rope_theta",
        "checkpoint.every_minutes",
    ],
)
def test_numbers_must_be_finite(call: Call, key: str, value: str) -> None:
    """Infinite settings gave NaN weights, exported as a finished model."""
    number = value.removeprefix(".")
    fail(
        call("config", "tiny-llama", f"{key}={value}"), rf"tiny-llama: {key}={number}: not a finite number; nearest: \d"
    )


def test_nan_in_the_last_step_is_a_failed_run(call: Call, tmp_path: Path) -> None:
    """It used to end with "all steps are already complete" and exit code 0."""
    (tmp_path / "nan_in_step_3.py").write_text(LOSS)
    arguments = ["train", "tiny-llama", *SMALL, "train.loss=nan_in_step_3:loss", "train.global_batch=4"]
    arguments += ["train.micro_batch=4", "train.steps=3", "checkpoint.resume=auto", "checkpoint.every=1"]
    code, out, err = call(*arguments)
    assert (code, err) == (1, "trainyard: step 3: the last step was skipped, so the run did not succeed\n")
    assert "Failed: 3 steps" in out
    assert "1 step skipped" in out
    assert "step 3 skipped: loss nan, not finite: gradient of" in out
    assert call(*arguments)[0] == 1  # nothing is left to do, and it still has not succeeded


def test_resumed_run_without_steps_left_succeeds(call: Call) -> None:
    arguments = ["train", "tiny-llama", *SMALL, "train.steps=1", "checkpoint.resume=auto", "checkpoint.every=1"]
    succeed(call(*arguments))
    assert "Nothing to do: step 1 of 1 is complete" in succeed(call(*arguments))


BROKEN_MODULES = {
    "def loss(output, batch):\n    return (\n": r"'\(' was never closed \(broken_module_\d.py, line 2\)",
    "import no_such_package\n": "No module named 'no_such_package'",
    "x = 1 / 0\n": "ZeroDivisionError: division by zero",
    "raise SystemExit\n": "SystemExit: ",
}


@pytest.mark.parametrize("number", range(len(BROKEN_MODULES)))
def test_user_module_that_cannot_be_imported_is_one_line(call: Call, tmp_path: Path, number: int) -> None:
    name, (text, message) = f"broken_module_{number}", list(BROKEN_MODULES.items())[number]
    (tmp_path / f"{name}.py").write_text(text)
    arguments = ["train", "tiny-llama", *SMALL, f"train.loss={name}:loss"]
    fail(call(*arguments), rf"train\.loss={name}:loss: cannot import {name}: {message}")


def run_on_a_full_disk(tmp_path: Path) -> list[str]:
    """Arguments that resume a run whose metrics go to a full disk."""
    directory = configs.tiny_config(
        train={"steps": 1}, checkpoint={"every": 1}, log={"directory": str(tmp_path), "name": "full"}
    )
    run = Trainer(directory).run()
    (run.directory / "metrics.jsonl").unlink()
    (run.directory / "metrics.jsonl").symlink_to("/dev/full")
    return ["train", str(run.directory), "checkpoint.resume=auto", "train.steps=3"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_full_disk_is_one_line_also_for_a_rank(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = run_on_a_full_disk(tmp_path)
    fail(call(*arguments), rf"{tmp_path}/full: No space left on device$", code=1)
    # As a rank of a launcher, which shows what its ranks have written.
    read_end, write_end = os.pipe()
    failure_file = tmp_path / "rank-0.json"
    monkeypatch.setenv(LAUNCHER_ENV, f"{read_end}:{failure_file}")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    code, _, err = call(*arguments)
    os.set_inheritable(write_end, False)  # open until this process ends, like the one of a launcher
    assert (code, err) == (1, "")
    failure = json.loads(failure_file.read_text())
    assert (failure["kind"], failure["text"]) == ("not writable", f"{tmp_path}/full: No space left on device")


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_full_disk_ends_two_ranks_with_one_line(cli: ForkServer, tmp_path: Path) -> None:
    done = cli.run([*run_on_a_full_disk(tmp_path), "--nproc", "2"], timeout=120)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == f"trainyard: rank 0: {tmp_path}/full: No space left on device"
    assert [line.split(":")[1] for line in lines[1:]] == [" logs of all ranks"]


def test_run_directory_stands_for_its_configuration(call: Call, tmp_path: Path) -> None:
    succeed(call("train", "tiny-llama", *SMALL, "train.steps=1", "checkpoint.every=1"))
    out = succeed(call("train", "runs/tiny-llama-smoke", "checkpoint.resume=runs/tiny-llama-smoke", "train.steps=2"))
    assert "resuming from step 1: runs/tiny-llama-smoke/checkpoints/step_00000001" in out
    assert "Next: trainyard train runs/tiny-llama-smoke train.steps=..." in out
    (tmp_path / "empty").mkdir()
    fail(call("train", "empty"), "empty: a directory without config.yaml, not a run directory; recipes: ")


THREAD_LOSS = """
import threading

def fail(number):
    raise OSError(number, "failed")

def loss(output, batch):
    for number in (28, 5):  # no space left, input/output error
        thread = threading.Thread(target=fail, args=(number,))
        thread.start()
        thread.join()
    return output.logits().sum() * 0 + 1, 1
"""


def test_full_disk_in_a_thread_leaves_its_report_to_the_main_thread(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard writes in a thread, whose traceback came before the line. Other errors of threads are shown."""
    monkeypatch.setattr("threading.excepthook", threading.excepthook)
    (tmp_path / "thread_loss.py").write_text(THREAD_LOSS)
    one_step = ["train.steps=1", "train.global_batch=1", "train.micro_batch=1", "checkpoint.every=0"]
    code, _, err = call("train", "tiny-llama", *SMALL, *one_step, "train.loss=thread_loss:loss")
    assert code == 0
    assert err.count("Traceback") == 1
    assert "[Errno 5]" in err

"""Loggers: real TensorBoard, W&B (offline) and MLflow (a local store) read back with their own readers, also after a
kill; loggers of the user; loggers that fail."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support import configs
from tests.support.logs import captured_log
from trainyard import Callback, Trainer
from trainyard.config.registries import LOGGERS
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.metrics.loggers.base import LoggedRun, Logger
from trainyard.metrics.loggers.build import logger_class
from trainyard.metrics.loggers.builtin.tensorboard import TensorBoardLogger
from trainyard.run import run_log
from trainyard.run.callbacks import TrainerView

STEPS, KILLED_AT, SAVED_AT = 10, 7, 4
SECTIONS: dict[str, dict[str, Any]] = {
    "data": {"source": "text", "validation_fraction": 0.05},
    "train": {"steps": STEPS},
    "checkpoint": {"every": SAVED_AT, "resume": "auto", "export_hf": False},
    "evaluate": {"every": 3, "batches": 1},
    "samples": {"every": 3, "max_new_tokens": 2, "prompts": ["A\nb"]},
}
MODULE = """
import json, pathlib, time
from trainyard import Logger

class Recorder(Logger):
    def start(self, run):
        self.file = (run.directory / "recorder.jsonl").open("a", buffering=1)
        self.note("start", run.resumed_step, run.continues, run.config["train"]["steps"])
    def note(self, *items):
        self.file.write(json.dumps(items) + "\\n")
    def log(self, step, record):
        self.note("log", step, record["loss"])
    def log_event(self, step, event):
        self.note("event", step, event["event"])
    def close(self, outcome):
        self.note("close", outcome)

class Broken(Logger):
    def log(self, step, record):
        if step == 2:
            raise OSError("no route\\nto host")

class Exits(Logger):
    def start(self, run):
        raise SystemExit(3)

class Unborn(Logger):
    def __init__(self):
        raise RuntimeError("no")

class Dies(Logger):
    def log(self, step, record):
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)

class Hangs(Logger):
    def log(self, step, record):
        time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, value in offline_environment(tmp_path_factory.getbasetemp()).items():
        monkeypatch.setenv(name, value)


def offline_environment(directory: Path) -> dict[str, str]:
    """Variables with which no library tries to reach a network."""
    return {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        **{f"WANDB_X_DISABLE_{name}": "true" for name in ("META", "MACHINE_INFO", "STATS")},
        "WANDB_DATA_DIR": str(directory / "wandb-data"),
        "WANDB_CACHE_DIR": str(directory / "wandb-cache"),
        "WANDB_CONFIG_DIR": str(directory / "wandb-config"),
        "MLFLOW_TRACKING_URI": f"file://{directory}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


@pytest.fixture
def my_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with loggers of the user."""
    (tmp_path / "my_loggers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("my_loggers", None)
    return "my_loggers"


def configure(tmp_path: Path, *loggers: str, **sections: dict[str, Any]) -> Config:
    return configs.tiny_config(log={"directory": str(tmp_path), "loggers": list(loggers)}, **sections)


def losses(directory: Path) -> dict[int, float]:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def train(config: Config) -> tuple[Path, list[str]]:
    lines: list[str] = []
    with captured_log(lines.append):
        directory = Trainer(config).run().directory
    assert all("\n" not in line for line in lines)
    return directory, [line for line in lines if line.startswith(("logger ", "the loggers "))]


# The three services.


def logger_process() -> psutil.Process:
    """The process of the loggers of this process."""
    (process,) = (
        child for child in psutil.Process().children() if "trainyard.metrics.loggers.child" in child.cmdline()
    )
    return process


class Kill(Callback):
    """Kills the process of the run, after it wrote the id of its loggers' process to a file."""

    def __init__(self, pid_file: Path) -> None:
        self.pid_file = pid_file

    def on_samples(self, trainer: TrainerView, records: list[dict[str, Any]]) -> None:
        time.sleep(0.5)  # the checkpoint of step SAVED_AT is complete

    def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        if record["step"] == KILLED_AT:
            self.pid_file.write_text(str(logger_process().pid))
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def resumed_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with all loggers that was killed at step KILLED_AT and resumed from step SAVED_AT."""
    directory = tmp_path_factory.mktemp("resumed")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in offline_environment(directory).items():
            patch.setenv(name, value)
        config = configure(directory, *LOGGERS.built_in, **SECTIONS)
        killed = multiprocessing.get_context("fork").Process(
            target=lambda: Trainer(config, callbacks=[Kill(directory / "pid")]).run()
        )
        killed.start()
        killed.join()
        assert killed.exitcode == -signal.SIGKILL
        with suppress(psutil.NoSuchProcess):
            psutil.Process(int((directory / "pid").read_text())).wait(120)
        assert list(losses(directory / "run")) == [*range(1, KILLED_AT + 1)]
        for name in ("run", "mlruns"):
            shutil.copytree(directory / name, directory / "killed" / name, symlinks=True)
        _, warnings = train(config)
        assert warnings == []
        yield directory / "run"


def test_names_of_loggers_have_classes() -> None:
    assert LOGGERS.built_in == ("tensorboard", "wandb", "mlflow")
    assert all(issubclass(logger_class(name), Logger) for name in LOGGERS.built_in)


@pytest.mark.nightly
def test_files_of_a_killed_and_resumed_run_have_each_step_once(resumed_run: Path) -> None:
    records = [json.loads(line) for line in (resumed_run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [*range(1, STEPS + 1)]
    assert [record["step"] for record in records if "evaluate/loss" in record] == [3, 6, 9, 10]
    samples = [json.loads(line) for line in (resumed_run / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [3, 6, 9, 10]
    events = [json.loads(line) for line in (resumed_run / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events] == [("start", 0), ("start", 4), ("end", 10)]


@pytest.mark.nightly
def test_tensorboard_of_a_resumed_run(resumed_run: Path) -> None:
    board = EventAccumulator(str(resumed_run / "tensorboard"))
    board.Reload()
    found = {event.step: event.value for event in board.Scalars("train/loss")}
    assert len(board.Scalars("train/loss")) == STEPS
    assert found == pytest.approx(losses(resumed_run))
    assert [event.step for event in board.Scalars("evaluate/loss")] == [3, 6, 9, 10]
    assert board.Scalars("train/consumed_tokens")[-1].value == STEPS * 4 * 16
    # This reader keeps text of dropped steps; the server of TensorBoard does not (tests/cli/test_board.py).
    assert sorted({event.step for event in board.Tensors("samples/0")}) == [3, 6, 9, 10]
    assert board.Tensors("samples/0")[0].tensor_proto.string_val[0].startswith(b"    A\n    b")
    assert b"global_batch: 4" in board.Tensors("config")[0].tensor_proto.string_val[0]
    assert [event.step for event in board.Tensors("events/start")] == [0, 4]


def wandb_records(run_directory: Path) -> list[dict[str, Any]]:
    """The records in all W&B files of a run, read by W&B."""
    found: list[dict[str, Any]] = []
    for path in sorted(run_directory.glob("wandb/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        records = [json.loads(line) for line in lines]
        run_id = json.loads((run_directory / "run.json").read_text())["id"]
        assert [record["run"]["run_id"] for record in records if record["type"] == "run"] == [run_id]
        found += records
    return found


def wandb_history(run_directory: Path) -> list[dict[str, Any]]:
    return [record["history"]["item"] for record in wandb_records(run_directory) if record["type"] == "history"]


@pytest.mark.nightly
def test_killed_run_is_failed_until_it_resumes(resumed_run: Path) -> None:
    """Nothing in the killed process could report it: its loggers do."""
    killed = resumed_run.parent / "killed" / "run"
    (exit_record,) = (record["exit"] for record in wandb_records(killed) if record["type"] == "exit")
    assert exit_record["exit_code"] == 1
    assert [run.info.status for run in mlflow_runs(killed)[1]] == ["FAILED"]


@pytest.mark.nightly
def test_wandb_of_a_resumed_run(resumed_run: Path) -> None:
    rows = wandb_history(resumed_run)
    assert [row["_step"] for row in rows if "train/loss" in row] == [*range(1, STEPS + 1)]
    assert {row["_step"]: row["train/loss"] for row in rows if "train/loss" in row} == losses(resumed_run)
    assert [row["_step"] for row in rows if "evaluate/loss" in row] == [3, 6, 9, 10]
    assert [row["_step"] for row in rows if row.get("samples._type") == "table-file"] == [3, 6, 9, 10]


def mlflow_runs(resumed_run: Path) -> tuple[Any, list[Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"file://{resumed_run.parent}/mlruns")
    experiment = client.get_experiment_by_name("trainyard")
    assert experiment
    return client, list(client.search_runs([experiment.experiment_id]))


@pytest.mark.nightly
def test_mlflow_of_a_resumed_run(resumed_run: Path) -> None:
    client, (run,) = mlflow_runs(resumed_run)
    assert (run.info.status, run.data.params["model.hidden"]) == ("FINISHED", "32")
    points = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in points] == [*range(1, STEPS + 1)]
    assert {point.step: point.value for point in points} == losses(resumed_run)
    points = client.get_metric_history(run.info.run_id, "evaluate/loss")
    assert [point.step for point in points] == [3, 6, 9, 10]
    files = [file.path for file in client.list_artifacts(run.info.run_id, "samples")]
    assert files == [f"samples/step_{step:08d}.txt" for step in (3, 6, 9, 10)]


@pytest.mark.nightly
def test_a_logger_that_is_added_later_gets_the_steps_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow with its default store, a SQLite file."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    train(configure(tmp_path, **{**SECTIONS, "train": {"steps": 5}}))
    directory, warnings = train(configure(tmp_path, *LOGGERS.built_in, **SECTIONS))
    assert warnings == []
    steps = [*range(1, STEPS + 1)]
    assert [row["_step"] for row in wandb_history(directory) if "train/loss" in row] == steps
    client = MlflowClient(uri)
    run_id = json.loads((directory / "mlflow.json").read_text())["run_id"]
    assert [point.step for point in client.get_metric_history(run_id, "train/loss")] == steps
    board = EventAccumulator(str(directory / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == steps


def test_tensorboard_files_that_a_kill_cut_off_anywhere_are_completed(tmp_path: Path) -> None:
    """What the file lost of steps before the checkpoint comes from metrics.jsonl."""
    lines = [{"step": step, "time": 1.0 + step, "loss": 1 / step} for step in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:5]))

    def run(first: int, resumed_step: int) -> list[int]:
        logger = TensorBoardLogger()
        logger.start(LoggedRun(tmp_path, "id", {"a": {"b": 1}}, resumed_step, continues=resumed_step > 0))
        for line in lines[first - 1 :]:
            logger.log(line["step"], line)
        logger.close("completed")
        board = EventAccumulator(str(tmp_path / "tensorboard"))
        board.Reload()
        return [event.step for event in board.Scalars("train/loss")]

    assert run(1, 0) == [1, 2, 3, 4, 5, 6]
    (first_file,) = (tmp_path / "tensorboard").iterdir()
    file = first_file.rename(first_file.with_name("events.out.tfevents.0000000001"))  # read first, also in this second
    content = file.read_bytes()
    for size in range(0, len(content), 17):
        file.write_bytes(content[:size])
        assert run(6, 5) == [1, 2, 3, 4, 5, 6], size
        for newer in set((tmp_path / "tensorboard").iterdir()) - {file}:
            newer.unlink()


# Loggers of the user, and failures.


def test_loggers_of_the_user_and_failures_change_nothing(tmp_path: Path, my_loggers: str) -> None:
    expected = losses(train(configure(tmp_path))[0])
    names = [f"{my_loggers}:{name}" for name in ("Recorder", "Broken", "Exits", "Unborn")]
    directory, warnings = train(configure(tmp_path, *names))
    assert losses(directory) == expected
    assert sorted(warnings) == [
        f"logger {my_loggers}:Broken failed in log: OSError: no route to host; the run continues without it",
        f"logger {my_loggers}:Exits failed in start: SystemExit: 3; the run continues without it",
        f"logger {my_loggers}:Unborn failed in __init__: RuntimeError: no; the run continues without it",
    ]
    notes = [json.loads(line) for line in (directory / "recorder.jsonl").read_text().splitlines()]
    logs = [["log", step, loss] for step, loss in expected.items()]
    assert notes == [["start", 0, False, 4], ["event", 0, "start"], *logs, ["event", 4, "end"], ["close", "completed"]]
    assert "no route" in (directory / "loggers.log").read_text()  # with a traceback


@pytest.mark.nightly
def test_a_process_of_loggers_that_dies_or_hangs_changes_nothing(
    tmp_path: Path, my_loggers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "CLOSE_TIMEOUT_S", 2.0)
    config = configure(tmp_path, f"{my_loggers}:Dies", train={"steps": 40})
    directory, warnings = train(config)
    assert warnings in (
        [],  # it died after the last step
        [f"the loggers have ended; the run continues without them (see {directory / 'loggers.log'})"],
    )
    directory, warnings = train(configure(tmp_path, f"{my_loggers}:Hangs"))
    assert warnings == ["the loggers are still busy after 2 s; their last records may be missing"]
    process = logger_process()
    process.kill()
    process.wait()
    assert len(losses(directory)) == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_loggers:Nothing", "log.loggers=my_loggers:Nothing: expected a subclass of trainyard.Logger"),
        ("my_loggers:pathlib", "trainyard.Logger as pathlib in my_loggers, found a module"),
        ("json:loads", "trainyard.Logger as loads in json, found a function"),
        ("no_such_module:X", "log.loggers=no_such_module:X: cannot import no_such_module: No module named"),
        ("wandb", "log.loggers=wandb: needs the package wandb, which is not installed: pip install 'trainyard[wandb]'"),
        ("mlflow", "log.loggers=mlflow: needs the package mlflow, .* 'trainyard.mlflow.'"),
    ],
)
def test_mistakes_are_one_line_before_the_run(
    name: str, message: str, tmp_path: Path, my_loggers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ":" not in name:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as error:
        Trainer(configure(tmp_path, name))
    assert "\n" not in str(error.value)
    assert message.split(".*")[0] in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["tensorbord"], "tensorbord is not one of tensorboard, wandb, mlflow or module:Class; nearest: tensorboard"),
        (["x.y"], "x.y is not one of .*; nearest: my_module:MyLogger"),
        (["wandb", "wandb"], "wandb is listed twice"),
    ],
)
def test_misspelled_names_are_configuration_errors(names: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        configure(tmp_path, *names)


def test_wandb_without_credentials_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    environment = {**os.environ, "HOME": str(tmp_path)}
    script = "from trainyard.metrics.loggers.build import check_loggers; check_loggers(['wandb'])"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240)
    assert "log.loggers=wandb: no API key for W&B; run `wandb login`" in done.stderr.splitlines()[-1]

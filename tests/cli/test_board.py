"""`trainyard board`: the real TensorBoard serves runs on loopback."""

import json
import re
import signal
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from tests.cli.conftest import Call, fail
from tests.support.forkserver import ForkServer
from trainyard.metrics.loggers.base import LoggedRun
from trainyard.metrics.loggers.builtin.tensorboard import TensorBoardLogger

DEADLINE_S = 60.0


def make_run(directory: Path, last_step: int = 6, resumed_step: int = 0) -> Path:
    """A run that logs until `last_step`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text("{}")
    logger = TensorBoardLogger()
    config = {"train": {"steps": 6}, "optimizer": {"lr": 1e-3}}
    logger.start(LoggedRun(directory, "id", config, resumed_step, continues=resumed_step > 0))
    logger.log_event(resumed_step, {"step": resumed_step, "time": 1.0, "event": "end", "outcome": "completed"})
    for step in range(resumed_step + 1, last_step + 1):
        logger.log(step, {"step": step, "time": 100.0 * resumed_step + step, "loss": 1 / step, "consumed_tokens": step})
        logger.log_samples(step, [{"step": step, "prompt": "Once", "text": f" upon {step}"}])
    logger.close("completed")
    return directory


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


class Board:
    """A running `trainyard board`."""

    def __init__(self, cli: ForkServer, *arguments: Path | str) -> None:
        self.process = cli.start(["board", *arguments, "--port", "0"])
        lines: list[str] = []

        def has_line() -> bool:
            assert self.process.stdout
            lines.extend(self.process.stdout.readlines())
            return self.process.poll() is not None or "\n" in "".join(lines)

        until(has_line)
        match = re.fullmatch(r"TensorBoard at (http://127\.0\.0\.1:\d+/) \(Ctrl-C ends it\)\n", "".join(lines))
        assert match, lines
        self.url = match[1]

    def ask(self, path: str, **query: str) -> Any:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.url}data/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return json.load(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()  # nothing, if the test has ended it

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.communicate(timeout=DEADLINE_S) == ("TensorBoard ended\n", "")
        assert self.process.returncode == 0


def test_board_serves_a_resumed_run_until_an_interrupt(cli: ForkServer, tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    make_run(tmp_path / "one", resumed_step=3)  # steps 4 to 6 again, as after a kill
    with Board(cli, tmp_path / "one") as board:
        until(lambda: "one" in board.ask("runs"))
        until(lambda: len(board.ask("plugin/scalars/scalars", run="one", tag="train/loss")) == 6)
        points = board.ask("plugin/scalars/scalars", run="one", tag="train/loss")
        assert [(point[1], point[0] > 200) for point in points] == [(step, step > 3) for step in range(1, 7)]
        texts = board.ask("plugin/text/text", run="one", tag="samples/0")
        assert [text["step"] for text in texts] == [1, 2, 3, 4, 5, 6]
        assert "Once upon 6" in texts[-1]["text"]
        assert "lr: 0.001" in board.ask("plugin/text/text", run="one", tag="config")[0]["text"]
        board.end()


@pytest.mark.nightly
def test_board_of_several_directories_and_new_runs(cli: ForkServer, tmp_path: Path) -> None:
    make_run(tmp_path / "runs/one")
    (tmp_path / "runs/no-tensorboard").mkdir()
    (tmp_path / "runs/no-tensorboard/config.yaml").write_text("{}")
    names = ["_".join((tmp_path / name / "one").parts[1:]) for name in ("runs", "elsewhere")]
    with Board(cli, tmp_path / "runs", make_run(tmp_path / "elsewhere/one", last_step=2)) as board:
        until(lambda: len(board.ask("runs")) == 2)
        assert sorted(board.ask("runs")) == sorted(names)
        make_run(tmp_path / "runs/new")
        until(lambda: "new" in board.ask("runs"))
        board.end()


def test_mistakes_are_one_line(call: Call, tmp_path: Path) -> None:
    fail(call("board", "nothing"), "nothing: no such directory")
    (tmp_path / "empty").mkdir()
    fail(call("board", "empty"), "empty: neither a run directory nor one with runs: no config.yaml")
    (tmp_path / "empty/config.yaml").write_text("{}")
    fail(call("board", "empty"), "empty: has no TensorBoard files")
    fail(call("board"), "Missing argument")
    fail(call("board", "empty", "--port", "99999"), "Invalid value for '--port'")


def test_a_port_in_use_is_one_line(call: Call, tmp_path: Path) -> None:
    make_run(tmp_path / "run", last_step=1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fail(call("board", "run", "--port", str(port)), f"--port {port}: .*already in use|--port {port}: .*port {port}")

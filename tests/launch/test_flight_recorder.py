"""The flight recorders of a hung run: the launcher asks every rank for its dump, names the files, and never blocks."""

import argparse
import gc
import os
import sys
import time
from pathlib import Path

import pytest

from trainyard.devices.cpu import CpuDevice
from trainyard.devices.cuda import recorder_environment
from trainyard.launch import flight_recorder
from trainyard.launch.flight_recorder import FlightRecorders, describe_dumps
from trainyard.launch.launcher import launch

RANK = """
# A rank as torch's NCCL backend behaves: it makes a pipe, looks at it now and then, and dumps to a file when asked.
import os, pickle, sys, threading, time
from pathlib import Path
from trainyard.launch.heartbeat import heartbeat_from_environment

rank, silent = os.environ["RANK"], sys.argv[1:]
prefix, stem = os.environ["TORCH_FR_DUMP_TEMP_FILE"], os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]
pipe = f"{stem}{rank}.pipe"
os.mkfifo(pipe)
if rank not in silent:
    handle = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

def request():
    try:
        return os.read(handle, 128)
    except BlockingIOError:  # the launcher has opened the pipe and not yet written
        return b""

def answer():
    while not request():
        time.sleep(0.05)
    Path(prefix + rank).write_bytes(pickle.dumps({"version": "2.10", "pg_config": {}, "entries": []}))

if rank not in silent:
    threading.Thread(target=answer, daemon=True).start()
heartbeat = heartbeat_from_environment()
for step in range(1, 41):  # the launcher must see some of them, on a busy machine too
    heartbeat.beat(step)
    time.sleep(0.1)
time.sleep(600)
"""


def hang(logs: Path, ranks: int, *silent: str) -> int:
    """Launch ranks that hang after a few steps; the `silent` ones have a pipe that nobody reads."""
    (logs.parent / "rank.py").write_text(RANK)
    return launch(
        silent,
        ranks,
        command=[sys.executable, str(logs.parent / "rank.py")],
        log_directory=logs,
        hang_timeout=1,
        recorder_environment=lambda directory: recorder_environment(directory, {}, True),
    )


def test_hung_run_dumps_the_collectives_of_all_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loader = pytest.importorskip("torch.distributed.flight_recorder.components.loader")
    logs = tmp_path / "logs"
    assert hang(logs, 2) == 1
    directory = logs / "flight-recorder"
    line = next(line for line in capfd.readouterr().err.splitlines() if "no step for" in line)
    assert line.endswith(f"last collectives: {directory}/{{rank_0,rank_1}}, compared by: torchfrtrace {directory}")
    assert sorted(path.name for path in directory.iterdir()) == ["rank_0", "rank_1"]  # the pipes are gone
    for folder, prefix in ((directory, None), (logs, "rank_")):  # of one host, and of several below one directory
        details, _ = loader.read_dir(argparse.Namespace(trace_dir=str(folder), prefix=prefix))
        gc.enable()  # which the reader disables
        assert sorted(dump["rank"] for dump in details.values()) == [0, 1]


@pytest.mark.nightly
def test_ranks_that_do_not_read_their_pipe_do_not_block_the_launcher(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    assert hang(logs, 2, "0", "1") == 1
    line = next(line for line in capfd.readouterr().err.splitlines() if "no step for" in line)
    assert "last collectives" not in line
    assert not (logs / "flight-recorder").exists()


def test_wait_for_a_rank_that_never_dumps_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "DUMP_LIMIT_S", 1.0)
    recorders = FlightRecorders(tmp_path, lambda directory: recorder_environment(directory, {}, True))
    pipe = recorders.directory / "request_0.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    start = time.monotonic()
    assert recorders.request_dumps() == 1
    dumps = recorders.wait_for_dumps(1)
    assert time.monotonic() - start < 30  # of which DUMP_LIMIT_S is one second
    assert dumps == []
    assert describe_dumps(dumps) == ""
    assert os.read(reader, 128)
    os.close(reader)


def test_device_without_a_recorder_gets_no_directory(tmp_path: Path) -> None:
    recorders = FlightRecorders(tmp_path, CpuDevice().flight_recorder_environment)
    assert recorders.environment == {}
    assert recorders.wait_for_dumps(recorders.request_dumps()) == []
    recorders.close()
    assert list(tmp_path.iterdir()) == []


def test_variables_that_the_user_has_set_remain(tmp_path: Path) -> None:
    dump, pipe = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
    old_size, new_size = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"
    assert recorder_environment(tmp_path, {}, True) == {dump: f"{tmp_path}/rank_", pipe: f"{tmp_path}/request_"}
    assert recorder_environment(tmp_path, {}, False).keys() == {dump, pipe, old_size}
    for name in (dump, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):  # the older name too
        assert recorder_environment(tmp_path, {name: "mine"}, True).keys() == {pipe}
    assert old_size not in recorder_environment(tmp_path, {old_size: "0"}, False)
    assert recorder_environment(tmp_path, {new_size: "0"}, False)[old_size] == "0"

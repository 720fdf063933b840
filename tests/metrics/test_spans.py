"""Span files: what ranks write follows the documented format, and readers survive whatever they find."""

import json
import logging
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.span_files import header_line, pack, read_step_times, write_span_file
from trainyard.metrics import span_recorder, spans
from trainyard.metrics.span_recorder import SpanRecorder
from trainyard.metrics.span_window import read_window
from trainyard.metrics.spans import NAMES, SpanHeader, read_spans

VALID = header_line(0) + pack([(step, "step", 0, step * 100, 2_500_000) for step in range(1, 6)])


def record_steps(path: Path, steps: range) -> None:
    recorder = SpanRecorder()
    recorder.open(path, SpanHeader(3, "node2", NAMES, recorder.start_unix_ns))
    for step in steps:
        recorder.begin_step(step)
        with recorder("forward"), recorder("wait"):
            time.sleep(0.001)
        recorder.end_step()
    recorder.close()


def test_a_file_has_the_documented_format(tmp_path: Path) -> None:
    path, before = tmp_path / "spans" / "rank-00003.spans", time.time_ns()
    record_steps(path, range(7, 9))
    line, _, body = path.read_bytes().partition(b"\n")
    header = json.loads(line)
    assert {key: header[key] for key in ("version", "rank", "host", "record_bytes")} == {
        "version": 1,
        "rank": 3,
        "host": "node2",
        "record_bytes": 24,
    }
    assert before <= header["start_unix_ns"] <= time.time_ns()
    records = [struct.unpack("<IHHQQ", body[at : at + 24]) for at in range(0, len(body), 24)]
    assert [(step, header["names"][name], depth) for step, name, depth, _, _ in records] == [
        (step, name, depth) for step in (7, 8) for name, depth in (("wait", 2), ("forward", 1), ("step", 0))
    ]
    for inner, outer in ((records[0], records[1]), (records[1], records[2])):
        assert outer[3] <= inner[3]
        assert inner[3] + inner[4] <= outer[3] + outer[4]
    assert all(1e6 <= duration < 1e9 for *_, duration in records)


def test_a_full_file_and_a_resumed_run_start_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spans" / "rank-00003.spans"
    record_steps(path, range(1, 4))
    record_steps(path, range(3, 6))
    assert [step for step, _ in read_step_times(tmp_path)[3]] == [1, 2, 3, 4, 5]
    old = path.with_name(path.name + ".old")
    assert read_spans(old, 3).named("step")["step"].tolist() == [1, 2, 3]  # type: ignore[union-attr]
    monkeypatch.setattr(span_recorder, "MAX_FILE_BYTES", 2000)
    monkeypatch.setattr(span_recorder, "WRITE_EVERY_NS", -1)
    record_steps(path, range(1, 60))
    assert path.stat().st_size <= 2000
    assert old.stat().st_size <= 2000
    assert [step for step, _ in read_step_times(tmp_path)[3]][-1] == 59


def test_a_full_disk_disables_the_recorder_with_one_warning(tmp_path: Path) -> None:
    """A limit on the size of files makes the kernel refuse to write, as a full disk does."""
    code = """
import logging, resource, signal, sys
from pathlib import Path
from tests.metrics.test_spans import SpanHeader, SpanRecorder, NAMES
from trainyard.metrics import span_recorder
logging.basicConfig(level=logging.WARNING)
span_recorder.WRITE_EVERY_NS = -1
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
recorder = SpanRecorder()
recorder.open(Path(sys.argv[1]), SpanHeader(0, "h", NAMES, 0))
for step in range(2000):
    recorder.begin_step(step)
    with recorder("forward"):
        pass
    recorder.end_step()
recorder.close()
print(recorder.records, recorder.writer.is_open)
"""
    path = tmp_path / "spans" / "rank-00000.spans"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout == "None False\n"
    assert done.stderr.count("WARNING") == 1
    assert "File too large" in done.stderr
    assert read_step_times(tmp_path)[0][0][0] == 0  # what was written before is readable


def test_a_directory_that_cannot_be_created_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "spans").write_text("a file")
    with caplog.at_level(logging.WARNING):
        record_steps(tmp_path / "spans" / "rank-00000.spans", range(1, 3))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert read_step_times(tmp_path) == {}


def test_step_times_of_all_ranks(tmp_path: Path) -> None:
    for rank in (0, 3, 12345):
        write_span_file(tmp_path, rank, [(step, "step", 0, 0, step * 10**6) for step in range(1, 101)])
    times = read_step_times(tmp_path)
    assert list(times) == [0, 3, 12345]
    assert times[3] == [(step, float(step)) for step in range(1, 101)]


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    """The run was killed after step 9, and has resumed from a checkpoint of step 1."""
    write_span_file(tmp_path, 0, [(step, "step", 0, 0, 10**6) for step in range(1, 10)], suffix=".old")
    write_span_file(tmp_path, 0, [(0, "forward", 1, 0, 1), *((step, "step", 0, 0, 5 * 10**6) for step in (2, 3))])
    assert read_step_times(tmp_path) == {0: [(1, 1.0), (2, 5.0), (3, 5.0)]}
    (window,) = read_window(tmp_path, None, None)
    assert window.milliseconds_by_step("step") == {1: 1.0, 2: 5.0, 3: 5.0}


def test_other_files_are_left_out(tmp_path: Path) -> None:
    write_span_file(tmp_path, 1, [(1, "step", 0, 0, 10**6)])
    (tmp_path / "spans/rank-00002.spans").mkdir()
    os.mkfifo(tmp_path / "spans/rank-00003.spans")  # opening it would wait for a writer
    (tmp_path / "spans/rank-x.spans").write_bytes(VALID)
    (tmp_path / "spans/rank-00004.spans").symlink_to("missing")
    assert list(read_step_times(tmp_path)) == [1]
    assert read_step_times(tmp_path / "missing") == {}


@pytest.mark.parametrize(
    "change",
    [
        {"record_bytes": 16},
        {"version": 2},
        {"names": "step"},
        {"names": [1]},
        {"start_unix_ns": "now"},
        {"start_unix_ns": 2**80},
    ],
)
def test_malformed_headers_are_left_out(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "spans" / "rank-00000.spans"
    path.parent.mkdir()
    path.write_bytes(header_line(0, **change) + VALID.partition(b"\n")[2])
    assert read_step_times(tmp_path) == {}


@examples(400)
@given(st.data())
def test_damaged_files_never_raise(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from([VALID, header_line(0), b"", b"\n", b"{" * 100_000 + b"\n"])))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=40))
    del content[data.draw(st.integers(0, len(content))) :]
    run = tmp_path_factory.mktemp("run")
    path = run / "spans" / "rank-00000.spans"
    path.parent.mkdir()
    path.write_bytes(content)
    for times in read_step_times(run).values():
        assert all(isinstance(step, int) and milliseconds >= 0 for step, milliseconds in times)
        assert len(times) <= len(content) // 24


def test_a_torn_last_record_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "spans" / "rank-00000.spans"
    path.parent.mkdir()
    for end in range(len(VALID) - 24, len(VALID)):
        path.write_bytes(VALID[:end])
        assert [step for step, _ in read_step_times(tmp_path)[0]] == [1, 2, 3, 4]


class _Queue:
    """A device whose work takes 40 ms for each reading of its clock, and runs while the host continues."""

    def __init__(self) -> None:
        self.running, self.now = False, 0.0

    def read_clock(self) -> float:
        self.now += 0.04
        return self.now

    def seconds_between(self, first: float, second: float) -> float:
        return second - first


def test_a_logged_step_is_placed_on_the_devices_clock(tmp_path: Path) -> None:
    recorder, path = SpanRecorder(), tmp_path / "spans" / "rank-00000.spans"
    recorder.origin_ns -= 10**9  # the fake clock below runs faster than time
    names = (*NAMES, *spans.DEVICE_NAMES)
    recorder.open(path, SpanHeader(0, "h", names, recorder.start_unix_ns, synchronous=False), _Queue())  # type: ignore[arg-type]
    for step in (1, 2):
        recorder.begin_step(step, logged=step == 2)
        with recorder("forward"):
            pass
        recorder.end_step()
        recorder.place_device_spans(lambda: None)
    recorder.close()
    read = read_spans(path, 0)
    assert read
    assert read.named("forward")["step"].tolist() == [1, 2]
    on_device = read.named("device forward")
    assert on_device["step"].tolist() == [2]
    assert on_device["duration"] == pytest.approx([40e6])
    whole = read.named("device step")
    assert whole["duration"] == pytest.approx([120e6])  # readings: step, forward, forward, step
    assert on_device["start"][0] - whole["start"][0] == pytest.approx(40e6, abs=1e3)

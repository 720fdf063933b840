"""Step times of ranks from span files."""

from pathlib import Path

import numpy as np
import pytest

from tests.dashboard.run_writer import write_run, write_spans
from trainyard.dashboard import step_times
from trainyard.dashboard.run_files import RunDirectoryReader
from trainyard.dashboard.step_times import heat_map, read_step_times


def test_the_outermost_spans_are_the_step_times(tmp_path: Path) -> None:
    directory = write_run(tmp_path, "run")
    for rank in range(3):
        write_spans(directory, rank, dict.fromkeys(range(1, 51), (10 + rank) * 1000000))
    # An attempt before: its steps 1 to 5 come first, and step 5 ran again.
    write_spans(directory, 2, dict.fromkeys(range(6), 99000000), "rank-00002.spans.old")
    path = write_spans(directory, 3, {1: 1, 2: 2})
    path.write_bytes(path.read_bytes()[:-7])  # cut off while it was written
    (directory / "spans" / "rank-00004.spans").write_bytes(b"not a header")
    times = read_step_times(RunDirectoryReader(tmp_path, "run"))
    assert {rank: len(pairs) for rank, pairs in times.items()} == {0: 50, 1: 50, 2: 51, 3: 1}
    assert np.allclose(times[2], [(0, 99), *((step, 12) for step in range(1, 51))])
    found = heat_map(times)
    assert found["ranks"] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert found["edges"][0] == 0
    assert found["rows"][1][1:] == [11.0] * 50
    assert found["rows"][1][0] is None
    assert found["slowest"][0]["rank"] == 2
    assert found["slowest"][0]["ratio"] == pytest.approx(12 / 10.5)


def test_many_ranks_and_steps_are_grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_run(tmp_path, "run")
    for rank in range(130):
        slow = 5 if rank == 77 else 1
        write_spans(directory, rank, dict.fromkeys(range(1, 401), slow * 1000000))
    found = heat_map(read_step_times(RunDirectoryReader(tmp_path, "run")))
    assert len(found["rows"]) <= step_times.MAX_ROWS
    assert {len(row) for row in found["rows"]} == {step_times.MAX_COLUMNS}
    (slow_row,) = [ranks for ranks, row in zip(found["ranks"], found["rows"], strict=True) if row[0] == 5]
    assert slow_row[0] <= 77 <= slow_row[1]
    monkeypatch.setattr(step_times, "TOTAL_BYTES", 130 * 48 * 10)
    times = read_step_times(RunDirectoryReader(tmp_path, "run"))
    assert [int(step) for step, _ in times[0]] == list(range(391, 401))
    assert heat_map({}) == {"ranks": [], "edges": [], "rows": [], "slowest": []}

"""Curves of growing files: what a client adds up is what the file holds."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dashboard.run_writer import training_record, write_lines, write_run
from tests.support.examples import examples
from trainyard.dashboard import curves
from trainyard.dashboard.curves import CurveStore
from trainyard.dashboard.run_files import RunDirectoryReader

BUCKETS = 500


def ask(store: CurveStore, run: RunDirectoryReader, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask as the page does, and add what is new to what was known."""
    if known is None or known["generation"] < 0:
        return store.curves(run, BUCKETS)
    answer = store.curves(run, BUCKETS, after=known["count"], generation=known["generation"])
    if answer.get("is_addition"):
        columns = {name: known["columns"][name] + values for name, values in answer["columns"].items()}
        return answer | {"columns": columns}
    return answer


@examples(100)
@given(content=st.lists(st.integers(1, 60), min_size=1, max_size=8), cut=st.integers(0, 300))
def test_additions_make_up_the_file(tmp_path_factory: pytest.TempPathFactory, content: list[int], cut: int) -> None:
    directory = tmp_path_factory.mktemp("runs") / "run"
    directory.mkdir()
    path, store, known, step = directory / "metrics.jsonl", CurveStore(), None, 0
    for count in content:
        lines = [json.dumps(training_record(step + index)) + "\n" for index in range(count)]
        text = "".join(lines)
        with path.open("a") as file:  # a reader may see any part of a line
            file.write(text[: len(text) - cut % len(text)])
            file.flush()
            known = ask(store, RunDirectoryReader(directory.parent, "run"), known)
            file.write(text[len(text) - cut % len(text) :])
        step += count
        known = ask(store, RunDirectoryReader(directory.parent, "run"), known)
        assert known["columns"]["step"] == list(range(step))
    expected = [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    assert known is not None
    assert known["columns"]["loss"] == [float(f"{loss:.6g}") for loss in expected]


def test_a_resumed_run_that_dropped_its_end_is_read_again(tmp_path: Path) -> None:
    path = write_run(tmp_path, "run", 100) / "metrics.jsonl"
    store, run = CurveStore(), RunDirectoryReader(tmp_path, "run")
    known = ask(store, run)
    assert known["count"] == 100
    replacement = path.with_name("new")
    write_lines(replacement, [training_record(step, loss=9.0) for step in range(1, 151)])  # longer than before
    replacement.replace(path)
    again = ask(store, run, known)
    assert not again.get("is_addition")
    assert set(again["columns"]["loss"]) == {9.0}
    path.write_text(path.read_text()[:2000])  # cut in place
    assert ask(store, run, again)["count"] < 10
    path.unlink()
    assert ask(store, run)["count"] == 0


def test_a_metric_that_appears_later_is_sent_with_all_rows(tmp_path: Path) -> None:
    path = write_run(tmp_path, "run", 10) / "metrics.jsonl"
    store, run = CurveStore(), RunDirectoryReader(tmp_path, "run")
    known = ask(store, run)
    with path.open("a") as file:
        file.write(json.dumps(training_record(11) | {"rewards/total": 0.5}) + "\n")
    known = ask(store, run, known)
    assert known["columns"]["rewards/total"] == [None] * 10 + [0.5]
    with path.open("a") as file:
        file.write(json.dumps(training_record(12)) + "\n")
    known = ask(store, run, known)
    assert known["is_addition"]
    assert known["columns"]["rewards/total"] == [None] * 10 + [0.5, None]


def test_a_large_file_is_shown_at_once_and_then_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "DIRECT_BYTES", 100_000)
    directory = write_run(tmp_path, "run", 3000)
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines.insert(1000, '{"x": "' + "y" * 3_000_000 + '"}\n')  # longer than any line of a run
    lines.insert(2000, "not JSON\n")
    (directory / "metrics.jsonl").write_text("".join(lines))
    store, run = CurveStore(), RunDirectoryReader(tmp_path, "run")
    first = store.curves(run, 100)
    assert not first["is_complete"]
    steps = first["columns"]["step"]
    assert steps[0] <= 2
    assert steps[-1] == 3000  # its whole length
    while not (answer := store.curves(run, 100))["is_complete"]:
        assert 0 <= answer["progress"] < 1
    assert answer["count"] == 3000
    assert len(answer["evaluations"]) == 60
    store.close()


def test_tables_that_were_not_shown_for_longest_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "MAX_CACHE_BYTES", 40_000)
    store = CurveStore()
    for number in range(6):
        write_run(tmp_path, f"run-{number}", 100)
        assert store.curves(RunDirectoryReader(tmp_path, f"run-{number}"), 100)["count"] == 100
    assert sum(found.table.nbytes for found in store._curves.values()) < 60_000
    assert store.curves(RunDirectoryReader(tmp_path, "run-0"), 100)["count"] == 100

"""The list of runs: status, changes, and files that lead out of the directory."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dashboard.run_writer import marked, rollout, write_lines, write_run
from tests.support.examples import examples
from trainyard.core.errors import UserError
from trainyard.dashboard.run_details import list_logs, read_checkpoints, read_config, read_events, read_log
from trainyard.dashboard.run_files import RunDirectoryReader
from trainyard.dashboard.run_list import RunList
from trainyard.dashboard.run_summary import KILLED, RunRow, read_summary, run_state
from trainyard.dashboard.run_texts import ROLLOUTS_BYTES, read_rollouts, read_texts, read_training_texts
from trainyard.dashboard.step_times import heat_map, read_step_times
from trainyard.metrics.run_directory import RunDirectory


def summary_of(runs: RunList, name: str) -> RunRow:
    run = runs.open(name)
    return read_summary(run, run_state(run))


def test_evaluation_of_a_run_with_named_sets_only_is_that_of_the_first(tmp_path: Path) -> None:
    run = write_run(tmp_path, "sets")
    lines = (run / "metrics.jsonl").read_text().replace('"evaluate/', '"evaluate/web/')
    (run / "metrics.jsonl").write_text(lines)
    write_run(tmp_path, "held-out")
    runs = RunList(tmp_path)
    runs.changes()
    assert (row := summary_of(runs, "sets"))
    assert row.evaluation == summary_of(runs, "held-out").evaluation is not None


def test_status_comes_from_the_lock_and_the_events(tmp_path: Path) -> None:
    write_run(tmp_path, "done")
    write_run(tmp_path, "broken", outcome="failed", error="step 3: the weights\nare not finite")
    write_run(tmp_path, "stopped", outcome="interrupted")
    write_run(tmp_path, "killed", outcome=None)
    (write_run(tmp_path, "eventless", steps=20) / "events.jsonl").unlink()
    away = write_run(tmp_path, "away", outcome=None)
    write_lines(away / "events.jsonl", [{"step": 0, "time": 1.0, "event": "start", "host": "another-host"}])
    runs = RunList(tmp_path)
    with RunDirectory.create(tmp_path, "training"):
        rows = {name: summary_of(runs, name) for name in runs.changes()["names"]}
        statuses = {name: row.status for name, row in rows.items()}
    assert statuses == {
        "away": "running",
        "broken": "failed",
        "done": "completed",
        "eventless": "unknown",
        "killed": "interrupted",
        "stopped": "interrupted",
        "training": "running",
    }
    assert rows["broken"].note == "step 3: the weights are not finite"
    assert rows["killed"].note == KILLED
    assert "another-host" in rows["away"].note
    assert (rows["eventless"].step, rows["eventless"].steps, rows["done"].ranks) == (20, 200, 2)
    assert summary_of(runs, "training").status == "unknown"
    os.utime(away / "metrics.jsonl", (1, 1))
    os.utime(away / "events.jsonl", (1, 1))
    assert summary_of(runs, "away").status == "unknown"


def test_only_changes_are_sent(tmp_path: Path) -> None:
    write_run(tmp_path, "a")
    runs = RunList(tmp_path)
    first = runs.changes()
    assert [run["name"] for run in first["runs"]] == ["a"]
    assert runs.changes(first["version"])["runs"] == []
    write_run(tmp_path, "b", steps=10)
    (tmp_path / "empty").mkdir()  # not a run
    second = runs.changes(first["version"])
    assert [run["name"] for run in second["runs"]] == ["b"]
    assert second["names"] == ["a", "b"]
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss": "nan"}\n{"step": 12, "lo')
    (third,) = runs.changes(second["version"])["runs"]
    assert (third["name"], third["step"], third["loss_text"]) == ("b", 11, "nan")
    assert "loss" not in third
    (tmp_path / "a").rename(tmp_path / ".hidden")
    assert runs.changes(second["version"])["names"] == ["b"]
    assert len(runs.changes("another-server-7")["runs"]) == 1
    assert RunList(tmp_path / "nothing").changes()["names"] == []


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Files outside of the directory of runs, and links to them from inside."""
    secret = write_run(tmp_path / "elsewhere", "secret")
    (secret / "logs").mkdir()
    (secret / "logs" / "x.log").write_text("secret")
    (secret / "samples.jsonl").write_text('{"step": 1, "prompt": "", "text": "secret"}\n')
    root = tmp_path / "runs"
    (root / "links").mkdir(parents=True)
    (root / "linked-run").symlink_to(secret)
    (root / "links" / "run.json").write_text("{}")
    for name in (
        "metrics.jsonl",
        "events.jsonl",
        "config.yaml",
        "inputs.jsonl",
        "rollouts.jsonl",
        "samples.jsonl",
        "logs",
        "spans",
        "checkpoints",
    ):
        (root / "links" / name).symlink_to(secret / name)
    return root


def test_links_lead_nowhere(outside: Path) -> None:
    runs = RunList(outside)
    assert runs.changes()["names"] == ["links"]
    with pytest.raises(UserError, match="no such run"):
        runs.open("linked-run")
    run = runs.open("links")
    assert summary_of(runs, "links").step is None
    assert read_config(run)["problem"] == "this run has no config.yaml"
    lists = (read_events, read_texts, read_training_texts, read_rollouts, list_logs, read_checkpoints)
    assert [read(run) for read in lists] == [[]] * len(lists)
    with pytest.raises(UserError, match="no such log"):
        read_log(run, "x.log")
    (outside / "links" / "logs").unlink()
    (outside / "links" / "logs").mkdir()
    (outside / "links" / "logs" / "y.log").symlink_to(outside.parent / "elsewhere" / "secret" / "logs" / "x.log")
    for file in ("y.log", "../config.yaml", "..", "../../../elsewhere/secret/logs/x.log", "/etc/hostname", "a\0.log"):
        with pytest.raises(UserError, match="no such log"):
            read_log(run, file)


def test_pipes_do_not_block(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    for name in (
        "run.json",
        "metrics.jsonl",
        "events.jsonl",
        "config.yaml",
        "inputs.jsonl",
        "samples.jsonl",
        "rollouts.jsonl",
    ):
        os.mkfifo(directory / name)
    done = threading.Thread(target=lambda: RunList(tmp_path).changes(), daemon=True)
    done.start()
    done.join(10)
    assert not done.is_alive()


@examples(200)
@given(
    name=st.text("./\\run~\0\n é\ud800", max_size=12)
    | st.sampled_from(["..", ".", "../runs", "/etc", "run/..", "run/../run", "run\0", ""])
)
def test_names_open_a_run_or_nothing(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    root = tmp_path_factory.getbasetemp() / "names"
    if not root.exists():
        write_run(root, "run")
    try:
        assert RunDirectoryReader(root, name).path.parent == root
    except UserError:
        assert name != "run"


CONTENT = st.binary(max_size=400) | st.text(max_size=400).map(lambda text: text.encode(errors="replace"))
YAML = st.sampled_from(
    [b"a: &x [1, 2]\nb: [*x, *x]\n", b"a: 1\na: 2\n", b"[1]", b"{" * 300, b"[" * 300, b"a: !!python/name:os.x", b""]
)


@examples(400)
@given(files=st.fixed_dictionaries({}, optional=dict.fromkeys(
    ["run.json", *(f"{name}.jsonl" for name in ("metrics", "events", "inputs", "samples", "rollouts")),
     "spans/rank-00000.spans", "logs/1.log"], CONTENT,
) | {"config.yaml": CONTENT | YAML}))  # fmt: skip
def test_any_bytes_in_the_files_are_survived(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    root = tmp_path_factory.mktemp("any")
    (root / "run").mkdir()
    for name, content in files.items():
        (root / "run" / name).parent.mkdir(exist_ok=True)
        (root / "run" / name).write_bytes(content)
    RunList(root).changes()
    run = RunDirectoryReader(root, "run")
    for read in (read_config, read_events, read_texts, read_training_texts, read_rollouts, list_logs, read_checkpoints):
        read(run)
    heat_map(read_step_times(run))


RECORD = {"source": "a", "sample": 1, "pair": 1, "pairs": 1, "prompt": marked(("a", False)), **marked(("b", True))}
RECORD |= {"chosen": marked(("c", True)), "rejected": marked(("d", True)), **rollout(1, "a", 1.0)}
VALUES = st.recursive(
    st.none() | st.integers(-1, 2) | st.floats() | st.sampled_from(["", "a", "nan"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*RECORD]), inner, max_size=3),
    max_leaves=4,
)


@examples(300)
@given(st.lists(st.fixed_dictionaries({}, optional={name: st.just(RECORD[name]) | VALUES for name in RECORD})))
def test_records_of_any_kind_are_survived(tmp_path_factory: pytest.TempPathFactory, records: list[Any]) -> None:
    directory = tmp_path_factory.getbasetemp() / "records" / "run"
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("inputs.jsonl", "rollouts.jsonl", "samples.jsonl"):
        write_lines(directory / name, records)
    run = RunDirectoryReader(directory.parent, "run")
    json.dumps([read(run) for read in (read_training_texts, read_rollouts, read_texts)], allow_nan=False)


def test_only_the_last_rollouts_are_read(tmp_path: Path) -> None:
    """Of a large file its end, without a group that it may have cut; what a resumed run wrote again counts once."""
    directory = write_run(tmp_path, "run")
    write_lines(directory / "rollouts.jsonl", [rollout(step, f"{step}", 0.0) for step in (1, 2, 1, 2, 3)])
    run = RunDirectoryReader(tmp_path, "run")
    assert [(group["step"], len(group["texts"])) for group in read_rollouts(run)] == [(3, 1), (2, 1), (1, 1)]
    long = "x" * (ROLLOUTS_BYTES // 10)
    write_lines(directory / "rollouts.jsonl", [rollout(step, long, 0.0) for step in range(1, 9) for _ in range(4)])
    assert [(group["step"], len(group["texts"])) for group in read_rollouts(run)] == [(8, 4), (7, 4)]
    assert max(len(text["text"]) for group in read_rollouts(run) for text in group["texts"]) == 4000


def test_a_small_file_that_is_a_huge_tree_is_cut(tmp_path: Path) -> None:
    directory = write_run(tmp_path, "run")
    (directory / "config.yaml").write_text("[" * 60_000)
    read_config(RunDirectoryReader(tmp_path, "run"))
    levels = ["a0: &a0 {x: 1, y: 2}"] + [f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 40)]
    (directory / "config.yaml").write_text("\n".join(levels))
    assert len(read_config(RunDirectoryReader(tmp_path, "run"))["keys"]) <= 2000
    lists = ["a0: &a0 [1, 2]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    (directory / "config.yaml").write_text("\n".join(lists))
    assert all(len(value) < 100 for value in read_config(RunDirectoryReader(tmp_path, "run"))["keys"].values())

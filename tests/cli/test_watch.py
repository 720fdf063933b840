"""`trainyard trace`, `profile` and `top --json` on a run with real ranks, one of which is slow."""

import gzip
import json
import re
from pathlib import Path

import pytest

from tests.support.forkserver import ForkServer
from tests.support.span_files import write_span_file
from tests.support.terminal import run_in_terminal
from trainyard.core.world import host_name

USER_CODE = """
import os
import time

import torch


def loss(output, batch):
    if os.environ["RANK"] == "1":
        time.sleep(0.5)
    logits, labels = output.logits().flatten(0, 1), batch["labels"].long().flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), labels.numel()
"""
STEPS = 6
TRAIN = [
    *("train", "tiny-llama", "--smoke", "checkpoint.export_hf=false", "log.loggers=[]", "evaluate.every=0"),
    *("train.loss=mine:loss", f"train.steps={STEPS}", "train.global_batch=2", "train.micro_batch=1", "log.every=1"),
    *("log.directory=runs", "log.name=run", "profile.steps=[4,5]", "profile.ranks=[1]", "--nproc", "2"),
]


@pytest.fixture(scope="module")
def slow_run(cli: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run on two ranks, of which rank 1 is slow."""
    directory = tmp_path_factory.mktemp("slow")
    (directory / "mine.py").write_text(USER_CODE)
    done = cli.run(TRAIN, cwd=directory)
    assert done.returncode == 0, done.stderr
    (directory / "output").write_text(done.stdout)
    return directory / "runs" / "run"


def test_the_run_itself_names_the_slow_rank(slow_run: Path) -> None:
    lines = (slow_run.parents[1] / "output").read_text().splitlines()
    (warning,) = (line for line in lines if "times the median" in line)
    assert warning.startswith(f"rank 1 on {host_name()} is slow: its part")
    records = [json.loads(line) for line in (slow_run / "metrics.jsonl").read_text().splitlines()]
    ratios = [record.get("straggler_ratio") for record in records if "loss" in record]
    assert len(ratios) == STEPS
    assert ratios[0] is None
    assert all(ratio >= 1 for ratio in ratios[1:])
    assert max(ratios[1:]) > 2  # the fast rank's waits for the slow one do not count


def test_the_slow_rank_is_found(cli: ForkServer, slow_run: Path) -> None:
    code, lines, broken_words = run_in_terminal(["trace", "run", "--steps", "2:"], cwd=slow_run.parent, server=cli)
    text = " ".join(" ".join(lines).split())
    assert code == 0, lines
    assert not broken_words
    assert all(len(line) <= 80 for line in lines)
    last = rf"rank 1 \({re.escape(host_name())}\) was last in (\d) of 5 steps"
    found = re.search(rf"{last}; the others waited (\S+) ms of (\S+) ms", text)
    assert found, text
    assert int(found[1]) >= 4
    assert 150 < float(found[2]) < float(found[3])
    events = json.loads(gzip.decompress((slow_run / "trace-2-6.json.gz").read_bytes()))["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"rank 0", "rank 1"}
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {2, 3, 4, 5, 6}


def test_ranks_and_output_can_be_chosen(cli: ForkServer, slow_run: Path, tmp_path: Path) -> None:
    done = cli.run(["trace", slow_run, "--steps", "3", "--ranks", "1", "--out", tmp_path / "t.json.gz"])
    assert done.returncode == 0, done.stderr
    events = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {3}
    assert "last in" not in done.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "t.json.gz"]


def test_profile_prints_kinds(cli: ForkServer, slow_run: Path) -> None:
    code, lines, broken_words = run_in_terminal(["profile", "run"], cwd=slow_run.parent, server=cli)
    assert code == 0, lines
    assert not broken_words
    assert lines[0] == "rank 1, steps 4 to 5: operators on the CPU, per step"
    rows = {match[1]: float(match[2]) for line in lines if (match := re.match(r"([a-z ,]+?) +(\d+\.\d\d)( |$)", line))}
    assert {"matmul", "attention", "all operators"} <= rows.keys()
    assert rows["all operators"] == pytest.approx(sum(rows.values()) / 2, rel=0.01)
    record = json.loads(cli.run(["profile", slow_run, "--json"]).stdout)
    assert record["steps"] == [4, 5]
    assert record["kinds_ms"]["matmul"] == pytest.approx(rows["matmul"], abs=0.01)


def test_top_names_the_slow_rank(cli: ForkServer, slow_run: Path) -> None:
    record = json.loads(cli.run(["top", slow_run, "--json", "--once"]).stdout)
    records = [json.loads(line) for line in (slow_run / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if "loss" in record][-1]
    status = record["run"]
    assert (status["state"], status["step"], status["steps"]) == ("not training", STEPS, STEPS)
    assert status["loss"] == last["loss"]
    assert status["tokens_per_second"] == last["tokens_per_second"]
    assert len(status["losses"]) == STEPS
    assert status["last"]["ranks"] == [1]
    assert status["last"]["others_wait_ms"] > 150


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace", "missing"], "missing: no such run directory"),
        (["trace", "empty"], "empty: has no spans; runs write them with log.spans=true"),
        (["trace", "spans", "--steps", "9:2"], "--steps 9:2: ends before it starts; nearest: 2:9"),
        (["trace", "spans", "--steps", "a:b"], "--steps a:b: not a range of steps; nearest: 100:150"),
        (["trace", "spans", "--steps", "7:8"], "spans: no spans of steps 7 to 8; the last recorded step is 2"),
        (["trace", "spans", "--ranks", "0-x"], "--ranks 0-x: not a list of ranks; nearest: 0-3,8"),
        (["trace", "spans", "--ranks", "5"], "--ranks 5: the run has spans of rank 0"),
        (["trace", "spans", "--out", "no/t.gz"], "no/t.gz: cannot be written: No such file or directory"),
        (["profile", "missing"], "missing: no such run directory"),
        (
            ["profile", "empty"],
            "empty: has no profile; runs write one with profile.steps",
        ),
        (["profile", "damaged"], "damaged/profile/rank-00000-steps-1-2.trace.json.gz: not a trace"),
        (["top", "empty"], "empty: not a run directory: it has neither config.yaml nor run.json"),
        (["train", "--smoke", "profile.steps=[7,99]"], "profile.steps=[7, 99]: the run ends with step train.steps=8"),
        (["train", "--smoke", "profile.steps=[7]"], "profile.steps=[7]: not a first and a last step; nearest: [7, 7]"),
        (
            ["train", "--smoke", "profile.steps=[5,2]"],
            "profile.steps=[5, 2]: not a first and a last step",
        ),
        (
            ["train", "--smoke", "profile.steps=[1,2]", "profile.ranks=[4]"],
            "profile.ranks=[4]: the last rank of the run is 0; nearest: [0]",
        ),
    ],
)
def test_a_mistake_is_one_line(cli: ForkServer, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged/profile").mkdir(parents=True)
    (tmp_path / "damaged/profile/rank-00000-steps-1-2.trace.json.gz").write_bytes(b"{")
    write_span_file(tmp_path / "spans", 0, [(1, "step", 0, 0, 10), (2, "step", 0, 10, 10)])
    done = cli.run(arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("trainyard: ")
    assert done.stderr.count("\n") == 1

"""neuron_parallel_compile: its command lines, and what it says, with texts as it prints them."""

import json
import sys
from pathlib import Path

import pytest

from trainyard import devices
from trainyard.cli.precompile import precompile as verb
from trainyard.config.load import load
from trainyard.core.errors import RunStopped, UserError
from trainyard.devices.cpu import CpuDevice
from trainyard.devices.neuron.parallel_compile import (
    CompileProgress,
    NeuronGraph,
    collect_command,
    compile_command,
    parse_progress,
    parse_report,
    precompile,
    short_train_command,
)

STAMP = "2026-03-13 20:14:50.000983:  42  INFO ||NEURON_PARALLEL_COMPILE||: "
GOOD = "/var/tmp/neuron-compile-cache/neuronxcc-2.21/MODULE_1+abcd0123/model.hlo_module.pb"
BAD = "/var/tmp/neuron-compile-cache/neuronxcc-2.21/MODULE_2+abcd0123/model.hlo_module.pb"


def output(report: dict[str, object], graphs: int, compiled: int, failed: int) -> str:
    return "\n".join(
        [
            "Current remaining items are 2, locked are 0, failed are 0, done are 0, total is 2",
            f"{STAMP}worker 0 finished with num of tasks 2....",
            STAMP + json.dumps(report, indent=4),
            f"{STAMP}Total graphs: {graphs}",
            f"{STAMP}Total successful compilations: {compiled}",
            f"{STAMP}Total failed compilations: {failed}",
            "",
        ]
    )


REPORT: dict[str, object] = {
    "compilation_summary": {"true": 1, "false": 1},
    "compilation_report": {
        GOOD: {"status": True, "retry": 0, "compile_time": 61.5},
        BAD: {"status": False, "retry": 1},
    },
    "start_time": 1.0,
}


def test_the_report_is_found_among_other_lines() -> None:
    report = parse_report("loss 0.0\n" + output(REPORT, 2, 1, 1) + "Killed\n")
    assert (report.graphs, report.compiled, report.failed) == (2, 1, 1)
    assert report.results == (NeuronGraph(GOOD, True, 0, 61.5), NeuronGraph(BAD, False, 1, None))
    assert report.failures == [BAD]


def test_totals_alone_are_enough() -> None:
    """The JSON is broken off, as by a log that was rotated."""
    text = output(REPORT, 26, 25, 1)
    report = parse_report(text.replace('"status": true', '"status": tr'))
    assert (report.graphs, report.compiled, report.failed, report.results) == (26, 25, 1, ())


def test_the_graphs_alone_are_enough() -> None:
    report = parse_report(STAMP + json.dumps(REPORT))
    assert (report.graphs, report.compiled, report.failed) == (2, 1, 1)


def test_the_last_of_two_reports_counts() -> None:
    later = {"compilation_summary": {"true": 1}, "compilation_report": {GOOD: {"status": True, "retry": 2}}}
    report = parse_report(output(REPORT, 2, 1, 1) + output(later, 1, 1, 0))
    assert (report.graphs, report.failed, report.results) == (1, 0, (NeuronGraph(GOOD, True, 2, None),))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No todo hlos found in cache",
        '{"compilation_summary": 3}',
        '{"compilation_summary": {}, "compilation_report": []}',
    ],
)
def test_nothing_to_compile_is_no_failure(text: str) -> None:
    report = parse_report(text)
    assert (report.graphs, report.compiled, report.failed, report.results) == (0, 0, 0, ())


def test_a_strange_entry_counts_as_failed() -> None:
    report = parse_report('{"compilation_summary": {}, "compilation_report": {"a": null, "b": {"status": "true"}}}')
    assert report.failures == ["a", "b"]


def test_how_far_it_is() -> None:
    line = f"{STAMP}Current remaining items are 5, locked are 2, failed are 1, done are 8, total is 16"
    assert parse_progress(line) == CompileProgress(5, 2, 1, 8, 16)
    assert parse_progress("Compiler status PASS") is None


def test_the_commands() -> None:
    run = short_train_command("llama2-7b", ["train.steps=100000", "layout.tp=8"], 32)
    command = collect_command(run)
    assert command[:3] == ["neuron_parallel_compile", "--command", "collect"]
    assert command[3:6] == [sys.executable, "-m", "trainyard"]
    assert command[-2:] == ["--nproc", "32"]
    assert "--nproc" not in short_train_command("llama2-7b", [], 1)
    assert compile_command() == ["neuron_parallel_compile", "--command", "compile"]
    assert compile_command(4)[-2:] == ["--num_parallel", "4"]


def test_the_short_run_differs_in_its_length_and_in_what_it_leaves_behind_alone() -> None:
    words = ["train.steps=100000", "checkpoint.every=100", "layout.tp=8"]
    short = load("llama2-7b", short_train_command("llama2-7b", words, 1)[5:])
    assert short.train.steps == 10
    assert not short.checkpoint.saving_enabled
    assert not short.checkpoint.export_hf
    same = {"model", "data", "optimizer", "precision", "layout", "recompute", "compile", "evaluate", "device"}
    whole = load("llama2-7b", words)
    assert all(getattr(short, name) == getattr(whole, name) for name in same)
    assert short.train.model_dump(exclude={"steps"}) == whole.train.model_dump(exclude={"steps"})


TOOL = f"""#!{sys.executable}
import sys
print("asked", *sys.argv[1:])
if "compile" in sys.argv:
    print({output(REPORT, 2, 1, 1)!r})
    sys.exit(1)  # as many as failed
if "fails" in sys.argv:
    print("trainyard: fails: no such file")
    sys.exit(1)
"""


@pytest.fixture
def tool(tmp_path: Path) -> dict[str, str]:
    """Stands in for neuron_parallel_compile."""
    path = tmp_path / "neuron_parallel_compile"
    path.write_text(TOOL)
    path.chmod(0o755)
    return {"PATH": str(tmp_path)}


def test_collecting_and_compiling(tool: dict[str, str]) -> None:
    seen: list[str] = []
    report = precompile(["train", "my.yaml"], 3, tool, seen.append)
    assert report.failures == [BAD]
    assert seen[:2] == ["asked --command collect train my.yaml", "asked --command compile --num_parallel 3"]


def test_a_training_that_fails_while_it_is_collected(tool: dict[str, str]) -> None:
    with pytest.raises(RunStopped, match="collecting graphs: exit code 1; trainyard: fails: no such file"):
        precompile(["fails"], None, tool)


def test_without_the_tool_it_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neuron_parallel_compile: not installed; it comes with torch-neuronx 2\.9"):
        precompile(["train"], None, {"PATH": str(tmp_path)})


def test_the_verb_leaves_such_devices_to_the_tool(
    tool: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Own(CpuDevice):
        precompiles = True

    monkeypatch.setattr(devices, "select", lambda name: Own())
    monkeypatch.setenv("PATH", tool["PATH"])
    assert verb("tiny-llama", ["optimizer.max_grad_norm=0.5"], nproc=2, workers=3) == 1
    said = capsys.readouterr().out
    assert "train tiny-llama optimizer.max_grad_norm=0.5 train.steps=10" in said
    assert "--nproc 2" in said
    assert "asked --command compile --num_parallel 3" in said
    assert f"Total graphs: 2\nTotal successful compilations: 1\nTotal failed compilations: 1\nfailed: {BAD}\n" in said

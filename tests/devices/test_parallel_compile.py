"""neuron_parallel_compile: command lines, and parsing of output as the tool prints it."""

import json
import os
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from trainyard import devices
from trainyard.cli.commands.precompile import precompile as verb
from trainyard.config.load import load
from trainyard.core.errors import RunStopped, UserError
from trainyard.devices.cpu import CpuDevice
from trainyard.devices.neuron.parallel_compile import (
    collect_command,
    compile_command,
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


def test_report_among_other_lines() -> None:
    report = parse_report("loss 0.0\n" + output(REPORT, 2, 1, 1) + "Killed\n")
    assert (report.graphs, report.compiled, report.failed) == (2, 1, 1)
    assert report.failures == [BAD]


def test_report_with_truncated_json() -> None:
    """The totals are enough, for example if the log was rotated."""
    text = output(REPORT, 26, 25, 1)
    report = parse_report(text.replace('"status": true', '"status": tr'))
    assert (report.graphs, report.compiled, report.failed, report.failures) == (26, 25, 1, [])


def test_report_without_totals() -> None:
    report = parse_report(STAMP + json.dumps(REPORT))
    assert (report.graphs, report.compiled, report.failed) == (2, 1, 1)


def test_last_of_two_reports() -> None:
    later = {"compilation_summary": {"true": 1}, "compilation_report": {GOOD: {"status": True, "retry": 2}}}
    report = parse_report(output(REPORT, 2, 1, 1) + output(later, 1, 1, 0))
    assert (report.graphs, report.failed, report.failures) == (1, 0, [])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No todo hlos found in cache",
        '{"compilation_summary": 3}',
        '{"compilation_summary": {}, "compilation_report": []}',
    ],
)
def test_nothing_to_compile(text: str) -> None:
    report = parse_report(text)
    assert (report.graphs, report.compiled, report.failed, report.failures) == (0, 0, 0, [])


def test_malformed_entry_counts_as_failed() -> None:
    report = parse_report('{"compilation_summary": {}, "compilation_report": {"a": null, "b": {"status": "true"}}}')
    assert report.failures == ["a", "b"]


def test_commands() -> None:
    run = short_train_command("llama2-7b", ["train.steps=100000", "layout.tp=8"], 32)
    command = collect_command(run)
    assert command[:3] == ["neuron_parallel_compile", "--command", "collect"]
    assert command[3:6] == [sys.executable, "-m", "trainyard"]
    assert command[-2:] == ["--nproc", "32"]
    assert "--nproc" not in short_train_command("llama2-7b", [], 1)
    assert compile_command() == ["neuron_parallel_compile", "--command", "compile"]
    assert compile_command(4)[-2:] == ["--num_parallel", "4"]


def test_short_run_differs_only_in_steps_and_outputs() -> None:
    words = ["train.steps=100000", "checkpoint.every=100", "layout.tp=8"]
    short = load("llama2-7b", short_train_command("llama2-7b", words, 1)[5:])
    assert short.train.steps == 10
    assert not short.checkpoint.saving_enabled
    assert not short.checkpoint.export_hf
    same = {"model", "data", "optimizer", "precision", "layout", "recompute", "compile", "evaluate", "device"}
    full = load("llama2-7b", words)
    assert all(getattr(short, name) == getattr(full, name) for name in same)
    assert short.train.model_dump(exclude={"steps"}) == full.train.model_dump(exclude={"steps"})


TOOL = f"""#!{sys.executable}
import sys
print("arguments", *sys.argv[1:])
if "compile" in sys.argv:
    print({output(REPORT, 2, 1, 1)!r})
    sys.exit(1)  # the number of failures
if "fails" in sys.argv:
    print("trainyard: fails: no such file")
    sys.exit(1)
"""


@pytest.fixture
def tool(tmp_path: Path) -> dict[str, str]:
    """A PATH with a fake neuron_parallel_compile."""
    path = tmp_path / "neuron_parallel_compile"
    path.write_text(TOOL)
    path.chmod(0o755)
    return {"PATH": str(tmp_path), "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache")}


def test_precompile_removes_stale_locks_and_cached_failures_first(tool: dict[str, str]) -> None:
    """A killed run leaves a lock that the tool waits for, and a failed graph that it does not compile again."""
    entries = Path(tool["NEURON_COMPILE_CACHE_URL"], "neuronxcc-2.21")
    for name, file, age_s in (("1", "model.hlo_module.pb.lock", 7200), ("2", "model.log", 0), ("3", "a.lock", 0)):
        path = entries / f"MODULE_{name}{uuid4().hex}+abcd0123" / file
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    lines: list[str] = []
    precompile(["train", "my.yaml"], 3, tool, lines.append)
    assert [line.partition(": ")[2] for line in lines[:2]] == [
        "1 stale lock removed",
        "1 failed graph removed, to be compiled again",
    ]
    assert lines[2].startswith("arguments --command collect")
    assert [path.name for path in entries.rglob("*.lock")] == ["a.lock"], "a new lock may have a holder"


def test_precompile_collects_and_compiles(tool: dict[str, str]) -> None:
    lines: list[str] = []
    report = precompile(["train", "my.yaml"], 3, tool, lines.append)
    assert report.failures == [BAD]
    assert lines[:2] == ["arguments --command collect train my.yaml", "arguments --command compile --num_parallel 3"]


def test_failure_while_collecting(tool: dict[str, str]) -> None:
    with pytest.raises(RunStopped, match="collecting graphs: exit code 1; trainyard: fails: no such file"):
        precompile(["fails"], None, tool)


def test_missing_tool_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neuron_parallel_compile: not installed; torch-neuronx 2\.9"):
        precompile(["train"], None, {"PATH": str(tmp_path)})


def test_precompile_command_uses_the_vendor_tool(
    tool: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class VendorDevice(CpuDevice):
        has_precompile_tool = True

    monkeypatch.setattr(devices, "select", lambda name: VendorDevice())
    for name, value in tool.items():
        monkeypatch.setenv(name, value)
    assert verb("tiny-llama", ["optimizer.max_grad_norm=0.5"], nproc=2, workers=3) == 1
    output_text = capsys.readouterr().out
    assert "train tiny-llama optimizer.max_grad_norm=0.5 train.steps=10" in output_text
    assert "--nproc 2" in output_text
    assert "arguments --command compile --num_parallel 3" in output_text
    assert (
        f"Total graphs: 2\nTotal successful compilations: 1\nTotal failed compilations: 1\nfailed: {BAD}\n"
        in output_text
    )

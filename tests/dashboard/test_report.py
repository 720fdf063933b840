"""The report: one file that works without a server and without a network."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.conftest import OpenTab
from tests.dashboard.run_writer import loss_spike, rollout, write_lines, write_run, write_spans
from tests.dashboard.test_browser import TABS, choose_axis, drawn, serious_problems
from trainyard.dashboard.report import STATIC, create_report, join_modules
from trainyard.dashboard.run_files import RunDirectoryReader


def test_modules_join_into_one_script_without_clashes() -> None:
    script = join_modules("main")
    names = re.findall(r"^(?:async )?(?:function|class|const|let) (\w+)", script, re.MULTILINE)
    modules = [path.stem for path in STATIC.glob("*.js")]
    assert len(names) == len(set(names))
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)
    assert all((STATIC / f"{name}.js").read_text().splitlines()[0].startswith("// ") for name in modules)
    assert all(script.count((STATIC / f"{name}.js").read_text().splitlines()[0]) == 1 for name in modules)


def test_a_report_works_from_a_file_without_a_network(open_tab: OpenTab, tmp_path: Path) -> None:
    run = write_run(tmp_path, "base", events=[loss_spike(120, [7, 11, 13])])
    write_spans(run, 0, dict.fromkeys(range(1, 50), 1000000))
    (run / "samples.jsonl").write_text('{"step": 5, "prompt": "</script>", "text": "<!--<script>\\u2028 é"}\n')
    private = {"sample": 1, "source": "private", "tokens": 1, "trained": 1, "shown": 1, "parts": [["private", True]]}
    write_lines(run / "inputs.jsonl", [private])
    write_lines(run / "rollouts.jsonl", [rollout(1, "private", 1.0)])
    (run / "logs").mkdir()
    (run / "logs" / "7.log").write_text("last line\n")
    write_run(tmp_path, "tuned", lr=0.006)
    readers = [RunDirectoryReader(tmp_path, name) for name in ("base", "tuned")]
    (tmp_path / "report.html").write_text(create_report(readers, with_plan=False))
    shown = open_tab(f"file://{tmp_path}/report.html", offline=True)
    tab: Any = shown.tab
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    assert len(drawn(tab)) > 5000
    assert tab.locator(".legend li").count() == 2
    assert tab.locator("#panel td").all_inner_texts() == ["optimizer.lr", "0.002", "0.006"]
    for name, content in {
        "Events": "7, 11, 13",
        "Data": "reports leave out",
        "Rollouts": "reports leave out",
        "Texts": "</script>",
        "Log": "last line",
        "Plan": "without",
    }.items():
        tab.get_by_role("tab", name=name).click()
        tab.locator("#panel").get_by_text(content).first.wait_for()
    assert "private" not in (tmp_path / "report.html").read_text()
    tab.get_by_label("Smoothing").fill("50")
    choose_axis(tab, "Tokens")
    assert serious_problems(tab) == []
    assert requests == []


@pytest.mark.nightly
def test_a_report_has_the_plan_of_a_real_run(open_tab: OpenTab, tmp_path: Path) -> None:
    command = ["train", "tiny-llama", "--smoke", "train.steps=6", "log.name=real", "log.every=1", "device.name=cpu"]
    subprocess.run([sys.executable, "-m", "trainyard", *command], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "report.html").write_text(create_report([RunDirectoryReader(tmp_path / "runs", "real")]))
    tab = open_tab(f"file://{tmp_path}/report.html", 400).tab
    tab.get_by_role("tab", name="Plan").click()
    tab.get_by_text("ms per step").wait_for()
    for name in TABS:
        tab.get_by_role("tab", name=name).click()
        assert tab.evaluate("document.documentElement.scrollWidth") == 400, name

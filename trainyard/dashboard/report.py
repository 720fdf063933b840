"""A report: the dashboard of one or two runs as one HTML file, with data, script and style in it."""

import base64
import hashlib
import json
import re
import time
from typing import Any

from trainyard import __version__
from trainyard.dashboard import STATIC
from trainyard.dashboard.curves import CurveStore
from trainyard.dashboard.plan_comparison import PlanComparisons
from trainyard.dashboard.run_details import list_logs, read_checkpoints, read_config, read_events, read_log
from trainyard.dashboard.run_files import RunDirectoryReader
from trainyard.dashboard.run_summary import read_summary, run_state
from trainyard.dashboard.run_texts import read_texts
from trainyard.dashboard.step_times import heat_map, read_step_times

MARKER = '<meta name="generator" content="trainyard report'
"""Begins near the start of every report, so that a report can be told from other files."""
BUCKETS = 500
MAX_LOGS = 20
"""The logs that were written last are part of the report."""
IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)


def create_report(runs: list[RunDirectoryReader], with_plan: bool = True) -> str:
    """The HTML of a report about `runs`; the first is shown in detail, and compared with the second."""
    data = {
        "list": {
            "root": "",
            "version": "report",
            "names": [run.name for run in runs],
            "runs": [read_summary(run, run_state(run)).to_json() for run in runs],
            "left_out": 0,
            "written": time.strftime("Report of %Y-%m-%d %H:%M"),
        },
        "parts": {run.name: collect_parts(run, with_plan) for run in runs},
    }
    return build_html(data, " and ".join(run.name for run in runs))


def collect_parts(run: RunDirectoryReader, with_plan: bool) -> dict[str, Any]:
    """Everything that the dashboard would ask the server about a run."""
    curves = CurveStore()
    curves.read_all(run)
    logs = sorted(list_logs(run), key=lambda log: -log["time"])[:MAX_LOGS]
    skipped = {"problem": "the report was written without the plan"}
    return {
        "curves": curves.curves(run, BUCKETS),
        "events": read_events(run),
        "config": read_config(run),
        "checkpoints": read_checkpoints(run),
        "samples": read_texts(run),
        "inputs": [],  # a report is sent to others, who may not be meant to read the data
        "rollouts": [],
        "step-times": heat_map(read_step_times(run)),
        "plan": {"state": "done", **(PlanComparisons().compute(run) if with_plan else skipped)},
        "logs": logs,
        "log-texts": {log["file"]: read_log(run, log["file"]) for log in logs},
    }


def build_html(data: dict[str, Any], title: str) -> str:
    scripts = [(STATIC / "uplot" / "uPlot.iife.min.js").read_text(), join_modules("main")]
    styles = [(STATIC / name).read_text() for name in ("uplot/uPlot.min.css", "style.css")]
    for script in scripts:
        assert "</script" not in script.lower()
    body = re.search(r"<body>.*</body>", (STATIC / "index.html").read_text(), re.DOTALL)
    assert body
    # In JSON, < and the line separators of JavaScript can only be part of strings.
    content = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{MARKER} {__version__}">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{_escape(title)} - trainyard</title>\n<link rel="icon" href="data:,">\n'
        + "".join(f"<style>{style}</style>\n" for style in styles)
        + f"</head>\n{body[0].removesuffix('</body>')}"
        + f'<script id="report-data" type="application/json">{content}</script>\n'
        + f'<script>{scripts[0]}</script>\n<script type="module">{scripts[1]}</script>\n</body>\n</html>\n'
    )


def join_modules(name: str, seen: set[str] | None = None) -> str:
    """A module of the dashboard and all that it imports as one script: a page without a server cannot import files."""
    seen = set() if seen is None else seen
    seen.add(name)
    text = (STATIC / f"{name}.js").read_text()
    imported = [join_modules(other, seen) for other in IMPORT.findall(text) if other not in seen]
    return "".join(imported) + re.sub(r"^export ", "", IMPORT.sub("", text), flags=re.MULTILINE)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

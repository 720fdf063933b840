"""How fast `trainyard page` opens many long runs, and how much memory it takes.

    python bench/page.py [--runs 200] [--steps 100000] [--directory DIR] [--out bench/results/page-cpu.json]

Writes RUNS run directories of STEPS logged steps each (47 MB for 100,000), starts the server, and measures requests
with cold files (the kernel has dropped them from its cache) and a server that has not seen them, then again. Chromium,
if there is one, opens the page: until the list and the curves of the three latest runs are drawn.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
MIB = 2**20
CONFIG = "data:\n  seq_len: 256\ntrain:\n  steps: {steps}\n  global_batch: 16\n"


def write_runs(root: Path, count: int, steps: int) -> int:
    """Write the runs; they differ only in name and age. Returns the size of one metrics.jsonl."""
    draw = random.Random(0)
    first = root / "run-000"
    first.mkdir(parents=True)
    with (first / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            record = {
                "step": step,
                "time": 1.79e9 + step,
                "consumed_samples": 16 * step,
                "consumed_tokens": 4096 * step,
                "ms_per_iteration": draw.gauss(500, 20),
                "tokens_per_second": draw.gauss(7700, 100),
                "sequences_per_second": draw.gauss(30, 1),
                "tflops_per_second": draw.gauss(0.05, 0.001),
                "mfu": draw.gauss(0.4, 0.01),
                "mfu_causal": draw.gauss(0.35, 0.01),
                "lr": 1e-3 * (1 - step / (steps + 1)),
                "global_batch": 16,
                "loss": 2 + draw.random() + (5 if step == steps // 3 else 0),
                "grad_norm": draw.random(),
                "param_norm": 37.3,
                "skipped": 0,
                "memory_bytes": 341401600,
            }
            file.write(json.dumps(record) + "\n")
    for number in range(count):
        directory = root / f"run-{number:03d}"
        directory.mkdir(exist_ok=True)
        if number:
            shutil.copyfile(first / "metrics.jsonl", directory / "metrics.jsonl")
        (directory / "config.yaml").write_text(CONFIG.format(steps=steps))
        (directory / "run.json").write_text(json.dumps({"id": str(number), "name": directory.name}))
        start = {"step": 0, "time": 1.79e9 + number, "event": "start", "ranks": 1, "device": "CPU", "resumed": False}
        end = {"step": steps, "time": 1.79e9 + steps, "event": "end", "outcome": "completed"}
        (directory / "events.jsonl").write_text(json.dumps(start) + "\n" + json.dumps(end) + "\n")
    return (first / "metrics.jsonl").stat().st_size


def drop_from_cache(root: Path) -> None:
    os.sync()
    for path in root.rglob("*.*"):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


class Server:
    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-m", "trainyard", "page", str(root), "--port", "0"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        ready = re.search(r"at (http\S+)", self.process.stdout.readline())
        if not ready:
            raise SystemExit("the server did not start")
        self.url = ready[1]

    def get(self, path: str) -> tuple[Any, float]:
        """The answer, and milliseconds until it was complete."""
        start = time.perf_counter()
        with urllib.request.urlopen(self.url + path, timeout=300) as answer:
            content = answer.read()
        return json.loads(content), (time.perf_counter() - start) * 1e3

    def complete_curve(self, name: str) -> float:
        """Milliseconds until all of a run's file is read."""
        start = time.perf_counter()
        while not self.get(f"api/runs/{name}/curves")[0]["is_complete"]:
            time.sleep(0.02)
        return (time.perf_counter() - start) * 1e3

    def memory_mib(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / MIB

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def open_in_browser(url: str) -> tuple[float, float] | None:
    """Seconds until the page shows curves of the latest runs, and until these are complete. None without Chromium."""
    executable = shutil.which("chromium")
    if not executable:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.goto(url + "static/style.css")  # the browser is running already when somebody opens the page
        start = time.perf_counter()
        tab.goto(url)
        tab.wait_for_selector("html[data-ready]", state="attached")
        shown = time.perf_counter() - start
        tab.wait_for_function("() => !document.querySelector('#curves').innerText.includes('Reading')", timeout=120_000)
        complete = time.perf_counter() - start
        browser.close()
    return shown, complete


def measure(root: Path, runs: int, spike_step: int) -> dict[str, float]:
    found: dict[str, float] = {}
    drop_from_cache(root)
    server = Server(root)
    try:
        found["memory_start_mib"] = server.memory_mib()
        answer, found["cold_list_ms"] = server.get("api/runs")
        assert len(answer["runs"]) == runs
        _, found["warm_list_ms"] = server.get("api/runs")
        _, found["unchanged_list_ms"] = server.get(f"api/runs?since={answer['version']}")
        first, found["cold_curve_first_ms"] = server.get("api/runs/run-000/curves")
        assert not first["is_complete"]
        found["cold_curve_complete_ms"] = server.complete_curve("run-000")
        warm, found["warm_curve_ms"] = server.get("api/runs/run-000/curves")
        assert spike_step in warm["columns"]["step"]
        found["curve_points"] = len(warm["columns"]["step"])
        query = f"api/runs/run-000/curves?from={spike_step - 500}&to={spike_step + 500}"
        _, found["zoomed_curve_ms"] = server.get(query)
        found["memory_one_curve_mib"] = server.memory_mib()
        for number in range(min(60, runs)):
            server.complete_curve(f"run-{number:03d}")
        found["memory_60_curves_mib"] = server.memory_mib()
    finally:
        server.stop()
    drop_from_cache(root)
    server = Server(root)
    try:
        if opened := open_in_browser(server.url):
            found["browser_cold_shown_s"], found["browser_cold_complete_s"] = opened
        if opened := open_in_browser(server.url):
            found["browser_warm_shown_s"], found["browser_warm_complete_s"] = opened
    finally:
        server.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--directory", type=Path, help="where to write the runs (default: a temporary directory)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        root = Path(directory) / "runs"
        size = write_runs(root, arguments.runs, arguments.steps)
        found = measure(root, arguments.runs, arguments.steps // 3)
    result = {"runs": arguments.runs, "steps": arguments.steps, "file_mib": round(size / MIB, 1)}
    result["load_average"] = round(os.getloadavg()[0], 1)
    result |= {name: round(value, 2 if name.endswith("_s") else 1) for name, value in found.items()}
    for name, value in result.items():
        print(f"{name:28}{value:>12,}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

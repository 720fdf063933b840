"""Make docs/guides/images/page-*.png, the pictures of `trainyard page` in its guide.

    python scripts/page_pictures.py [RUNS_DIR]

Trains small models on this machine in a temporary directory, or shows the runs of RUNS_DIR: one completes, one has a
higher learning rate, one reads noise now and then, one diverges and fails, one is killed, one has four ranks, one
trains on conversations. The numbers are those of these runs. Needs Chromium and playwright.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "guides" / "images"
STEPS = 300
COMMON = [
    *(f"train.steps={STEPS}", "log.every=1", "evaluate.every=50", "device.name=cpu"),
    *("data.seq_len=64", "train.global_batch=8", "train.micro_batch=8"),
]
RUNS = {
    "baseline": ["samples.every=100", "checkpoint.every=100"],
    "lr-0.03": ["optimizer.lr=0.03", "optimizer.max_grad_norm=0"],
    "bad-data": ["data.source=text", "data.paths=[corpus.txt]", "train.steps=600"],
    "diverged": ["optimizer.lr=1e6", "optimizer.max_grad_norm=0"],
    "four-ranks": ["train.steps=100", "train.micro_batch=1"],
    "killed": ["optimizer.lr=0.0005"],
    "chat": ["data.source=chat", "data.seq_len=256", "train.steps=20"],
}
"""Runs of the recipe tiny-llama and what they change."""


def write_corpus(path: Path) -> None:
    """Two sentences again and again, with some noise that causes spikes of the loss."""
    draw = random.Random(0)
    page = (ROOT / "docs" / "guides" / "train.md").read_text()
    sentences = [" ".join(part.split()) + ". " for part in page.split(". ")[:2]]
    noise = ["".join(chr(draw.randrange(33, 0x250)) for _ in range(150)) for _ in range(4)]
    blocks = ["".join(draw.choices(sentences, k=500)) for _ in noise]
    path.write_text("".join(f"{block}{line}" for block, line in zip(blocks, noise, strict=True)))


def train(directory: Path, name: str, overrides: list[str]) -> None:
    """Train one run; its exit code does not matter, since one of them fails."""
    options = ["--nproc", "4"] if name == "four-ranks" else []
    command = [sys.executable, "-m", "trainyard", "train", "tiny-llama", *COMMON, f"log.name={name}", *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *options], cwd=directory, env=environment, start_new_session=True)
    if name == "killed":
        metrics = directory / "runs" / name / "metrics.jsonl"
        while process.poll() is None and (not metrics.is_file() or metrics.read_text().count("\n") < STEPS // 2):
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def take(browser: Browser, url: str, name: str, width: int, height: int, choices: str, **options: Any) -> None:
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    tab = context.new_page()
    tab.goto(url + choices)
    tab.wait_for_selector("html[data-ready]", state="attached")
    tab.wait_for_selector("#panel > :not(.computing)", timeout=120_000)
    tab.wait_for_timeout(500)
    if "tab=" in choices:
        tab.locator("#details").scroll_into_view_if_needed()
        tab.locator("#details").screenshot(path=TARGET / f"page-{name}.png")
    else:
        tab.screenshot(path=TARGET / f"page-{name}.png")
    context.close()


def main() -> None:
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(sys.argv[1]).absolute().parent if len(sys.argv) > 1 else Path(temporary)
        if len(sys.argv) == 1:
            write_corpus(directory / "corpus.txt")
        for name, overrides in {} if len(sys.argv) > 1 else RUNS.items():
            train(directory, name, overrides)
        command = [sys.executable, "-m", "trainyard", "page", "runs", "--port", "0"]
        server = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True)
        assert server.stdout
        url = server.stdout.readline().rpartition(" at ")[2].strip()
        selected = "#runs=baseline&runs=lr-0.03&runs=killed&runs=bad-data&run=baseline"
        try:
            with sync_playwright() as started:
                browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                take(browser, url, "curves", 1280, 860, selected)
                take(browser, url, "dark", 1280, 860, selected + "&smoothing=45&axis=tokens", color_scheme="dark")
                take(browser, url, "phone", 400, 800, selected, is_mobile=True)
                take(browser, url, "events", 1000, 900, "#runs=bad-data&run=bad-data&tab=events")
                take(browser, url, "times", 1000, 900, "#runs=four-ranks&run=four-ranks&tab=times")
                take(browser, url, "config", 1000, 900, selected + "&tab=config&other=lr-0.03")
                take(browser, url, "data", 1000, 900, "#runs=chat&run=chat&tab=data")
                browser.close()
        finally:
            server.terminate()
            server.wait(30)


if __name__ == "__main__":
    main()

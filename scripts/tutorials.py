"""Run the tutorials: the commands of the column "This machine" of docs/tutorials/*.md, exactly as printed.

    python scripts/tutorials.py docs/tutorials/deepseek.md            # run, and compare the outputs with the page
    python scripts/tutorials.py docs/tutorials/deepseek.md --update   # run, and write outputs, pictures and time
    python scripts/tutorials.py PAGE --keep DIR                       # run in DIR and leave it there

A page is a sequence of blocks. A block of bash with title="This machine" is run by one bash for the whole page, in an
empty directory, with the virtual environment on the path; a command that fails ends the run. A block of text with
title="Output" after it is what it printed, with "..." for lines left out; an empty one is filled by --update. Lines are
compared with numbers masked, except for steps and losses: steps are equal, losses within a fifth. Text that a model
generates has title="Example output": --update writes it, and nothing compares it, since rounding differs by machine.

<!-- loss: RUN... --> before a picture draws the loss of runs there, <!-- page: RUN... --> takes a screenshot of
`trainyard page` (needs Chromium), <!-- charts: RUN... --> one of its first two charts, and <!-- time --> ...
<!-- /time --> contains the duration of all commands.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r'^```(?P<language>\w+) title="(?P<title>[^"]+)"\n(?P<body>.*?)^```$', re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"<!-- (?P<kind>loss|page|charts): (?P<runs>[^>]+) -->\n!\[[^\]]*\]\((?P<path>[^)]+)\)")
TIME = re.compile(r"(?<=<!-- time -->).*?(?=<!-- /time -->)", re.DOTALL)
COMMANDS, OUTPUT, EXAMPLE = "This machine", "Output", "Example output"
GAP = "..."
MAX_OUTPUT_LINES = 30
"""Lines of an output that --update writes into an empty block; the middle of a longer one is left out."""
TIMEOUT_S = 900
LOSS_TOLERANCE = 0.2
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
UNIT = re.compile(r"(#) ?(?:ns|us|µs|ms|s|min|hours?|days?|B|KiB|MiB|GiB|kB|MB|GB)\b")
BAR = re.compile(r"[█▏▎▍▌▋▊▉╸━╺]+")


@dataclass
class Block:
    title: str
    body: str
    start: int
    """Position of the body within the page."""
    line: int


@dataclass
class Result:
    command: Block
    output: str
    seconds: float
    code: int


def read_blocks(text: str) -> list[Block]:
    return [
        Block(match["title"], match["body"], match.start("body"), text.count("\n", 0, match.start("body")))
        for match in BLOCK.finditer(text)
    ]


class Shell:
    """One bash for all commands of a page, so that variables and background jobs last."""

    def __init__(self, directory: Path) -> None:
        hidden = ("TRAINYARD_", "SLURM", "OMP_NUM_THREADS")  # a reader has none of them
        environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        environment |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "100",
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.files = tempfile.TemporaryDirectory()
        self.script, self.log, self.done, cache = (
            Path(self.files.name) / name for name in ("script", "log", "done", "cache")
        )
        environment["TRAINYARD_CACHE"] = str(cache)  # compile as on a machine that has never seen the page
        self.process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def run(self, command: Block) -> Result:
        assert self.process.stdin
        self.script.write_text(command.body)
        self.log.write_text("")
        self.done.unlink(missing_ok=True)
        start = time.monotonic()
        # `set -e` outside of a condition, so that it holds within the sourced file.
        self.process.stdin.write(
            f"trap 'echo $? > {self.done}.part; mv {self.done}.part {self.done}' EXIT\n"
            f"set -e; source {self.script} >> {self.log} 2>&1 < /dev/null; set +e\n"
            f"echo 0 > {self.done}.part; mv {self.done}.part {self.done}\n"
        )
        self.process.stdin.flush()
        while not self.done.exists():
            if time.monotonic() - start > TIMEOUT_S:
                return Result(command, self.log.read_text() + f"\nno end after {TIMEOUT_S} s", TIMEOUT_S, 124)
            time.sleep(0.05)
        text = self.log.read_text(errors="replace")
        return Result(command, text, time.monotonic() - start, int(self.done.read_text()))

    def close(self) -> None:
        """End the shell and what it left in the background."""
        try:
            os.killpg(self.process.pid, 15)
            self.process.wait(30)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            self.process.kill()
        self.files.cleanup()


def shown(output: str, directory: Path) -> list[str]:
    """Lines as a page shows them: without escapes, overwritten progress and names of this machine."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    text = text.replace(str(directory), "~/tutorial").replace(str(ROOT), "~/trainyard")
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+/cache\b", "~/.cache/trainyard", text)
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "laptop", text)
    lines = [line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        lines.pop(0)
    return lines


def masked(line: str) -> str:
    """A line with numbers, their units and bars replaced, steps excepted."""
    steps: list[str] = []

    def keep(match: re.Match[str]) -> str:
        steps.append(match[0])
        return f"<{chr(ord('a') + len(steps) % 26)}>"

    line = re.sub(r"\bstep[ _]\d+(?:/\d+)?", keep, BAR.sub("", line))
    line = UNIT.sub(r"\1", NUMBER.sub("#", line))
    return re.sub(r"[\s─-]+", " ", line).strip() + "".join(f" {step}" for step in steps)


def losses(line: str) -> list[float]:
    return [float(value) for value in re.findall(r"\bloss (\d+\.\d+)", line)]


def same_line(expected: str, actual: str, any_loss: bool) -> bool:
    if masked(expected) != masked(actual) or any_loss:
        return masked(expected) == masked(actual)
    pairs = zip(losses(expected), losses(actual), strict=True)
    return all(abs(first - second) <= LOSS_TOLERANCE * max(first, 0.1) for first, second in pairs)


def align(expected: list[str], actual: list[str], any_loss: bool = False) -> list[str] | str:
    """The page's lines with what was printed now, or a message about the first line that is missing."""
    result: list[str] = []
    position, gap = 0, False
    for line in expected:
        if line.strip() == GAP:
            result.append(line)
            gap = True
            continue
        end = len(actual) if gap else position + 1
        found = next((i for i in range(position, min(end, len(actual))) if same_line(line, actual[i], any_loss)), None)
        if found is None:
            return (
                f"not printed: {line!r}; next line: {actual[position]!r}"
                if position < len(actual)
                else f"not printed: {line!r}"
            )
        result.append(actual[found])
        position, gap = found + 1, False
    if not gap and position < len(actual):
        return f"not on the page: {actual[position]!r}"
    return result


def abridged(lines: list[str]) -> list[str]:
    if len(lines) <= MAX_OUTPUT_LINES:
        return lines
    head = MAX_OUTPUT_LINES // 3
    return [*lines[:head], GAP, *lines[head + 1 - MAX_OUTPUT_LINES :]]


def run_page(page: Path, directory: Path, update: bool) -> list[str]:
    """Run the commands of a page; returns what differs from it. With `update`, the page is rewritten."""
    text = page.read_text()
    problems: list[str] = []
    replacements: list[tuple[int, str, str]] = []
    result: Result | None = None
    total = 0.0
    shell = Shell(directory)
    try:
        for block in read_blocks(text):
            if block.title == COMMANDS:
                result = shell.run(block)
                total += result.seconds
                print(f"{page.name}:{block.line}: {result.seconds:.1f} s, exit code {result.code}", flush=True)
                if result.code:
                    tail = "\n".join(shown(result.output, directory)[-30:])
                    problems.append(f"{page.name}:{block.line}: exit code {result.code}\n{block.body}\n{tail}")
                    break
            elif block.title in (OUTPUT, EXAMPLE):
                assert result, f"{page.name}:{block.line}: an output without commands"
                lines, expected = shown(result.output, directory), block.body.splitlines()
                compared = expected and block.title == OUTPUT
                new = align(expected, lines, any_loss=update) if compared else abridged(lines)
                if isinstance(new, str):
                    problems.append(f"{page.name}:{block.line}: {new}")
                elif update:
                    replacements.append((block.start, block.body, "".join(f"{line}\n" for line in new)))
    finally:
        shell.close()
    print(f"{page.name}: {total:.0f} s in all", flush=True)
    if update and not (problems and result and result.code):
        for start, old, new_text in reversed(replacements):
            text = text[:start] + new_text + text[start + len(old) :]
        minutes = f"{total / 60:.1f} minutes"
        page.write_text(TIME.sub(minutes, text))
        draw_pictures(page, directory)
    return problems


def draw_pictures(page: Path, directory: Path) -> None:
    for match in PICTURE.finditer(page.read_text()):
        runs = [directory / name for name in match["runs"].split()]
        target = page.parent / match["path"]
        target.parent.mkdir(exist_ok=True)
        if match["kind"] == "loss":
            target.write_text(loss_curves(runs))
        else:
            take_screenshot(runs, target, match["kind"] == "charts")


def loss_curves(runs: list[Path]) -> str:
    """An SVG with the training loss of each run over its steps, readable on light and dark pages."""
    width, height, left, bottom, top = 640, 260, 48, 36, 24
    colors = ("#0d9488", "#d97706", "#7c3aed", "#dc2626")
    curves = {}
    for run in runs:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        curves[run.name] = [(row["step"], row["loss"]) for row in rows if "loss" in row and "step" in row]
    points = [point for curve in curves.values() for point in curve]
    last, highest = max(step for step, _ in points), max(loss for _, loss in points)
    lowest = min(loss for _, loss in points)
    low, high = max(lowest - 0.1 * (highest - lowest), 0.0), highest + 0.05 * (highest - lowest)

    def place(step: float, loss: float) -> str:
        x = left + (width - left - 12) * step / last
        y = top + (height - top - bottom) * (high - loss) / (high - low)
        return f"{x:.1f},{y:.1f}"

    gray = "#808a94"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">'
    ]
    for i in range(5):
        loss = low + (high - low) * i / 4
        y = place(0, loss).partition(",")[2]
        parts.append(f'<line x1="{left}" x2="{width - 12}" y1="{y}" y2="{y}" stroke="{gray}" stroke-opacity="0.3"/>')
        parts.append(f'<text x="{left - 6}" y="{float(y) + 4:.1f}" text-anchor="end" fill="{gray}">{loss:.1f}</text>')
        x = place(last * i / 4, low).partition(",")[0]
        parts.append(
            f'<text x="{x}" y="{height - bottom + 18}" text-anchor="middle" fill="{gray}">{last * i // 4}</text>'
        )
    parts.append(f'<text x="{width / 2}" y="{height - 4}" text-anchor="middle" fill="{gray}">step</text>')
    for i, (name, curve) in enumerate(curves.items()):
        color = colors[i % len(colors)]
        line = " ".join(place(step, loss) for step, loss in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        parts.append(
            f'<text x="{width - 16}" y="{top + 4 + 16 * i}" text-anchor="end" fill="{color}">loss of {name}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def take_screenshot(runs: list[Path], target: Path, only_charts: bool) -> None:
    """A picture of `trainyard page` that shows the runs, or of the first two charts there."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "trainyard", "page", runs[0].parent.name, "--port", "0"]
    server = subprocess.Popen(command, cwd=runs[0].parents[1], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        url = server.stdout.readline().rpartition(" at ")[2].strip()
        chosen = "#" + "&".join(f"runs={run.name}" for run in runs) + f"&run={runs[-1].name}"
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            width = 1280 if only_charts else 1120
            tab = browser.new_context(viewport={"width": width, "height": 480}).new_page()
            tab.goto(url + chosen)
            tab.wait_for_selector("html[data-ready]", state="attached")
            tab.wait_for_selector("#panel > :not(.computing)", timeout=120_000)
            tab.wait_for_timeout(500)
            if only_charts:
                first, second = (tab.locator(".chart").nth(index).bounding_box() for index in (0, 1))
                size = {"width": second["x"] + second["width"] - first["x"], "height": first["height"]}
                tab.screenshot(path=target, clip={"x": first["x"], "y": first["y"], **size})
            else:
                tab.screenshot(path=target)
            browser.close()
    finally:
        server.terminate()
        server.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the commands of tutorials and compare what they print.")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--update", action="store_true", help="write outputs, pictures and the time into the page")
    parser.add_argument("--keep", type=Path, help="run in this directory, which must not exist, and keep it")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the shell and its processes end
    problems = []
    for page in arguments.pages:
        with tempfile.TemporaryDirectory() as temporary:
            directory = arguments.keep.absolute() if arguments.keep else Path(temporary) / "tutorial"
            directory.mkdir(parents=True)
            problems += run_page(page, directory, arguments.update)
    print("\n\n".join(problems))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

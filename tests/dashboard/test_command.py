"""`trainyard page` and `trainyard report` as commands: what they print, their mistakes, how they end."""

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.cli.conftest import Call, call, fail, succeed  # noqa: F401
from tests.dashboard.conftest import WAIT_S
from tests.dashboard.run_writer import write_run

ROOT = Path(__file__).parents[2]


def test_the_page_starts_without_torch_and_a_signal_ends_it(tmp_path: Path) -> None:
    code = "import sys\nsys.modules['torch'] = None\nfrom trainyard.cli.main import main\nmain()"
    command = [sys.executable, "-c", code, "page", "--port", "0"]  # the default directory does not exist yet
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        ready = re.fullmatch(r"runs of runs at (http://127\.0\.0\.1:\d+/)\n", process.stdout.readline())
        assert ready, process.stderr.read()
        write_run(tmp_path / "runs", "new")
        with urllib.request.urlopen(ready[1] + "api/runs", timeout=WAIT_S) as answer:
            assert b'"new"' in answer.read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        assert process.stdout.read() + process.stderr.read() == ""


@pytest.mark.nightly
def test_a_token_is_made_if_others_can_connect(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainyard", "page", str(tmp_path), "--host", "0.0.0.0", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        ready = re.search(r"at http://0\.0\.0\.0:(\d+)/\?token=(\S{32})\n", process.stdout.readline())
        assert ready
        address = f"http://127.0.0.1:{ready[1]}/api/runs"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(address, timeout=WAIT_S)
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {ready[2]}"})
        assert urllib.request.urlopen(request, timeout=WAIT_S).status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0


def test_mistakes_are_one_line(call: Call, tmp_path: Path) -> None:  # noqa: F811
    write_run(tmp_path, "run")
    (tmp_path / "file").write_text("x")
    fail(call("page", "nowhere"), "nowhere: no such directory")
    fail(call("page", "file"), "file: not a directory")
    fail(call("page", "run"), rf"run: is one run; nearest: trainyard page {tmp_path}")
    fail(call("page", ".", "--host", "no.such.host.invalid"), "--host no.such.host.invalid: no such host")
    fail(call("page", ".", "--token-file", "nope"), "--token-file nope: No such file")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        fail(call("page", ".", "--port", port), rf"--port {port}: in use")
    fail(call("report", "nowhere"), "nowhere: no such run directory")
    fail(call("report", "."), r"\.: not a run directory")
    fail(call("report", "run", "--compare", "nowhere"), "nowhere: no such run directory")
    fail(call("report", "run", "--compare", "./run"), r"--compare run: has the same name as run")
    fail(call("report", "run", "--out", "nowhere/x.html"), "--out nowhere/x.html: .*nowhere is not a directory")
    fail(call("report", "run", "--out", "run"), "--out run: is a directory")
    fail(call("report", "run", "--out", "file"), "--out file: exists and is not a report")
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("module", ["starlette"])
def test_without_the_extra_it_says_what_to_install(
    module: str,
    call: Call,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith(("trainyard.dashboard", "starlette"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    fail(call("page", tmp_path), rf"this needs the package {module}, .*: pip install 'trainyard\[page\]'")


def test_a_report_is_written_and_replaced(call: Call, tmp_path: Path) -> None:  # noqa: F811
    write_run(tmp_path, "run")
    write_run(tmp_path, "other", lr=0.1)
    for _ in range(2):
        assert re.fullmatch(r"run/report.html: \d+ KiB\n", succeed(call("report", "run", "--no-plan")))
    succeed(call("report", "run", "--no-plan", "--compare", "other", "--out", "both.html"))
    text = (tmp_path / "both.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "//" not in re.sub(r"https?://www\.w3\.org/\S+", "", text.split("<body>")[0].split("<style>")[0])

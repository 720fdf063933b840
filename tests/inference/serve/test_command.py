"""The command: its ready line, its mistakes, and how it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import openai
import pytest

from tests.cli.conftest import Call, call, fail  # noqa: F401
from tests.inference.serve.conftest import HTTP, WAIT_S

ROOT = Path(__file__).parents[3]
STREAM = {"prompt": "x", "max_tokens": 900_000, "stream": True}
StartCommand = Callable[..., tuple["subprocess.Popen[str]", str]]


@pytest.fixture
def start_command(tmp_path: Path) -> Iterator[StartCommand]:
    """Starts `trainyard serve` in a process; returns it and the URL of its ready line."""
    processes = []

    def start(*arguments: str, **environment: str) -> tuple["subprocess.Popen[str]", str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.inference.serve.fake_command", "serve", *arguments, "--port", "0"],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout
        ready = process.stdout.readline()
        found = re.fullmatch(r"serving my-run at (http://127\.0\.0\.1:\d+/v1)\n", ready)
        assert found, ready + _rest(process.stderr)
        return process, found[1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=WAIT_S)


def _rest(stream: IO[str] | None) -> str:
    return stream.read() if stream else ""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_signal_ends_the_server_cleanly(start_command: StartCommand, number: int) -> None:
    process, url = start_command("runs/my-run")
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    assert client.completions.create(model="my-run", prompt="say:hi").choices[0].text == "hi"
    with HTTP.stream("POST", url + "/completions", json=STREAM) as answer:
        process.send_signal(number)
        assert "shutting_down" in list(answer.iter_lines())[-2]
    assert process.wait(WAIT_S) == 0  # the stream alone would take many minutes
    assert _rest(process.stdout) + _rest(process.stderr) == ""


@pytest.mark.nightly
def test_an_engine_that_stays_broken_ends_the_command_with_one_line(start_command: StartCommand) -> None:
    process, url = start_command("elsewhere", "--model-name", "my-run", FAKE_FAULT="1")
    for _ in range(3):
        assert HTTP.post(url + "/completions", json={"prompt": "x"}).status_code == 500
    assert process.wait(WAIT_S) == 1
    assert _rest(process.stderr).splitlines()[-1] == "trainyard: the engine failed: RuntimeError: device lost"


def test_mistakes_are_one_line(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.delenv("TRAINYARD_SERVE_TOKEN", raising=False)
    (tmp_path / "empty").write_text(" \n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        fail(call("serve", "x", "--port", port), rf"--port {port}: in use; choose another one, or 0")
    for host in ("0.0.0.0", "::"):
        fail(
            call("serve", "x", "--host", host),
            rf"--host {host}: others can reach it, so it needs a token: --token-file",
        )
    fail(call("serve", "x", "--host", "no.such.host.invalid"), "--host no.such.host.invalid: no such host")
    monkeypatch.setenv("TRAINYARD_SERVE_TOKEN", "t")
    fail(call("serve", "x", "--host", "192.0.2.1"), r"--host 192.0.2.1: not an address of this machine")
    fail(call("serve", "x", "--token-file", "nope"), "--token-file nope: No such file or directory")
    fail(call("serve", "x", "--token-file", "empty"), "--token-file empty: must hold one token")
    fail(call("serve", "x", "--port", "70000"), "Invalid value for '--port'")
    fail(call("serve", "nope", "--port", "0"), "nope: ")


@pytest.mark.parametrize("module", ["fastapi", "uvicorn"])
def test_without_the_extra_it_says_what_to_install(
    module: str,
    call: Call,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("trainyard.inference.serve", "trainyard.core.web_server"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    fail(call("serve", "x"), rf"this needs the package {module}, .*: pip install 'trainyard\[serve\]'")


def test_other_commands_do_not_import_the_server() -> None:
    code = (
        "import sys\nfor name in ('fastapi', 'uvicorn', 'jinja2.sandbox', 'torch'): sys.modules[name] = None\n"
        "from trainyard.cli.main import main\n"
        "for line in ('recipes', 'generate --help', 'serve --help'):\n"
        "    sys.argv[1:] = line.split()\n"
        "    try: main()\n"
        "    except SystemExit as end: assert end.code == 0, line\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage: trainyard serve" in done.stdout

"""A fixture that runs commands inside the test process, which is faster than a new process."""

import sys
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from trainyard.cli import main

RunMain = Callable[[list[str]], CompletedProcess[str]]


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunMain:
    """Runs `trainyard` with the given arguments."""

    def run(args: list[str]) -> CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["trainyard", *args])
        with pytest.raises(SystemExit) as caught:
            main.main()
        out, err = capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return CompletedProcess(args, caught.value.code, out, err)

    return run

"""Fixtures for tests of commands."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainyard.cli import main

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Run a command in this process, in `tmp_path`; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trainyard", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main.main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, *capfd.readouterr()

    return run

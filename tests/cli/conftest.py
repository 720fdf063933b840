"""Fixtures for tests of commands."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainyard.cli import main

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: these tests do not check durability."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


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


def succeed(result: tuple[int, str, str]) -> str:
    """Assert that a command succeeded without error output; returns its stdout."""
    code, out, err = result
    assert code == 0, err
    assert not err
    return out


def fail(result: tuple[int, str, str], message: str, code: int = 2) -> None:
    """Assert that a command failed with `code` and one line that starts with `message`, a regular expression."""
    found, _, err = result
    assert found == code, err
    assert err.count("\n") == 1, err
    assert re.match(f"trainyard: {message}", err), err

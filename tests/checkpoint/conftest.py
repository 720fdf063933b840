"""Fixtures for all checkpoint tests."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_fsync() -> Iterator[None]:
    """Skip fsync in this process: no test here cuts the power. (Killed runs are separate processes and do fsync.)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield

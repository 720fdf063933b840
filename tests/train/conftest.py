"""Fixtures for all tests of steps."""

from tests.run.conftest import _cheap_runs  # noqa: F401

"""Fixtures for all tests of checkpoint formats."""

from tests.checkpoint.conftest import _no_fsync  # noqa: F401

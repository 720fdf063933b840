"""These tests need torch_xla, and with it another torch: `make test-xla`. An ordinary run collects none of them."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import pytest

collect_ignore_glob = [] if find_spec("torch_xla") else ["test_*.py"]

LIMIT = 240.0
"""Seconds; ranks that wait for each other in vain are ended by XLA itself, much sooner."""
VARIABLES = {
    "PJRT_DEVICE": "CPU",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",  # what runs for a second need not be compiled for ten
}
Apart = Callable[..., Any]


@pytest.fixture(scope="session")
def apart() -> Iterator[Apart]:
    """Runs job(*arguments) in a process with these variables, one for each choice of them: torch_xla reads its
    variables once, when it is imported."""
    pools: dict[tuple[tuple[str, str], ...], ProcessPoolExecutor] = {}

    def run(job: Callable[..., Any], *arguments: Any, **variables: str) -> Any:
        key = tuple(sorted(variables.items()))
        with patch.dict(os.environ, {**VARIABLES, **variables}):
            pool = pools.setdefault(key, ProcessPoolExecutor(1, get_context("spawn")))
            return pool.submit(job, *arguments).result(LIMIT)

    yield run
    for pool in pools.values():
        pool.shutdown()

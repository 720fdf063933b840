"""These tests need torch_xla and its version of torch: `make test-xla`. Other runs collect none of them."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import pytest

collect_ignore_glob = [] if find_spec("torch_xla") else ["test_*.py"]

TIMEOUT_S = 240.0
"""XLA itself ends ranks that wait for each other in vain, much sooner."""
VARIABLES = {
    "PJRT_DEVICE": "CPU",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",  # tests run for a second, so they should not compile for ten
}
RunIsolated = Callable[..., Any]


@pytest.fixture(scope="session")
def run_isolated() -> Iterator[RunIsolated]:
    """Run job(*arguments) in a process with the given environment variables; calls with equal variables share a
    process. torch_xla reads its variables once, at import."""
    pools: dict[tuple[tuple[str, str], ...], ProcessPoolExecutor] = {}

    def run(job: Callable[..., Any], *arguments: Any, **variables: str) -> Any:
        key = tuple(sorted(variables.items()))
        with patch.dict(os.environ, {**VARIABLES, **variables}):
            pool = pools.setdefault(key, ProcessPoolExecutor(1, get_context("spawn")))
            return pool.submit(job, *arguments).result(TIMEOUT_S)

    yield run
    for pool in pools.values():
        pool.shutdown()

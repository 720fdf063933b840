"""What all tests share: an offline environment, the fast and the nightly tier, one fork server for commands."""

import hashlib
import os
import signal
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests make their own models; nothing is downloaded
os.environ.setdefault("COLUMNS", "200")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two workers share two cores

import pytest
import torch

from tests.support.forkserver import ForkServer

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run on the CPU then
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores SIGINT in background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the nightly tests too")
    parser.addoption("--nightly-part", metavar="K/N", help="run only the K-th of N parts of the nightly tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the nightly tests unless asked for. A test named on the command line (file::test) always runs."""
    part = config.getoption("--nightly-part")
    if part:
        index, count = (int(number) for number in part.split("/"))
        kept = [item for item in items if _is_nightly(item) and _bucket(item, count) == index % count]
    elif config.getoption("--nightly") or any("::" in argument for argument in config.args):
        return
    else:
        kept = [item for item in items if not _is_nightly(item)]
    left_out = [item for item in items if item not in set(kept)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _is_nightly(item: pytest.Item) -> bool:
    return item.get_closest_marker("nightly") is not None


def _bucket(item: pytest.Item, count: int) -> int:
    """Which part a test is in. A pool of ranks or a compile cache serves a whole file, so that files stay together."""
    return int.from_bytes(hashlib.sha256(item.nodeid.encode()).digest()[:4], "big") % count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    deselected = len(stats.get("deselected", []))
    reasons: dict[str, int] = {}
    for report in stats.get("skipped", []):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "?"
        reasons[reason] = reasons.get(reason, 0) + 1
    skipped = [f"{count} skipped ({reason})" for reason, count in sorted(reasons.items())]
    nightly = [f"{deselected} nightly tests (make test-all runs them)"] if deselected else []
    terminalreporter.write_line("Left out: " + ("; ".join(nightly + skipped) or "nothing"))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def cli() -> Iterator[ForkServer]:
    """Runs `trainyard` commands in forks of one warm process."""
    server = ForkServer()
    yield server
    server.close()

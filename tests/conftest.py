"""What all tests share: an offline environment, the fast and the nightly tier, one fork server for commands."""

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests make their own models; nothing is downloaded
os.environ.setdefault("COLUMNS", "200")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two workers share two cores

import pytest
import torch

from tests.support.forkserver import ADDRESS_ENV, LIBRARIES_OF_TESTS, ROOT, ForkServer
from tests.support.slurm_fixtures import slurm, slurm_cluster  # noqa: F401

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run on the CPU then
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores SIGINT in background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)


SHARED_SERVER = os.environ.pop(ADDRESS_ENV, None)
"""In a worker of pytest-xdist: the server from which it has been forked."""
LEFT_OUT = pytest.StashKey[int]()
POOL_TESTS = "tests/distributed/"
"""The tests that use a pool of ranks."""
SLURM_TESTS = ("tests/cluster/test_slurm.py", "tests/cluster/doctor/test_nodes.py")
"""The tests that share one Slurm cluster."""
LONG_GROUPS = (*SLURM_TESTS, POOL_TESTS, "tests/cli/test_precompile.py", "tests/launch/", "tests/cluster/")


def pytest_collection_finish() -> None:
    """Exempt what is imported and collected, a million objects, from garbage collection: a tenth of the CPU time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(_XdistHooks())  # in pytest_configure, the number of workers is already set
    parser.addoption("--nightly", action="store_true", help="run the nightly tests too")
    parser.addoption("--nightly-part", metavar="K/N", help="run only the K-th of N parts of the nightly tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the nightly tests unless asked for. A test named on the command line (file::test) always runs."""
    part = config.getoption("--nightly-part")
    if part:
        index, count = (int(number) for number in part.split("/"))
        selected = [item for item in items if _is_nightly(item)][index % count :: count]  # variants of a test spread
    elif config.getoption("--nightly") or any("::" in argument for argument in config.args):
        selected = items[:]
    else:
        selected = [item for item in items if not _is_nightly(item)]
    config.stash[LEFT_OUT] = len(items) - len(selected)
    items[:] = sorted(selected, key=_start_order)  # stable: the order within a file stays


def _start_order(item: pytest.Item) -> int:
    """Position of a test's group: the long groups start first, so that no worker is left alone with one at the end."""
    file = item.nodeid.partition("::")[0]
    return next((place for place, group in enumerate(LONG_GROUPS) if file.startswith(group)), len(LONG_GROUPS))


def _is_nightly(item: pytest.Item) -> bool:
    return item.get_closest_marker("nightly") is not None


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # an xdist worker: tell the controller, which collects no tests itself
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


class _XdistHooks:
    """Hooks of pytest-xdist, which the environment of `make test-xla` does not have."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_auto_num_workers(self) -> int:
        """One worker more than cores, at most four: tests of launchers and Slurm mostly wait for other processes."""
        return min((os.cpu_count() or 1) + 1, 4)

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Fork the workers from one process that has imported what most of them need, and share it for commands."""
        if set(getattr(config.option, "tx", ())) == {"popen"} and not hasattr(config, "workerinput"):
            server = ForkServer(imports=LIBRARIES_OF_TESTS)
            server.start_server()
            config.add_cleanup(server.close)
            os.environ[ADDRESS_ENV] = server.address
            python = f"{sys.executable} -S -E {ROOT}/tests/support/forked_python.py {server.address}"
            config.option.tx = [f"popen//python={python}"] * len(config.option.tx)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Run the tests of a file on one worker, where they share fixtures, and all distributed tests on one, too.

        Two pools of eight ranks would slow each other down on two cores. Tests of the Slurm cluster share one worker.
        """
        from xdist.scheduler import LoadScopeScheduling

        class FileScheduling(LoadScopeScheduling):
            def _split_scope(self, nodeid: str) -> str:
                file = nodeid.partition("::")[0]
                if file in SLURM_TESTS:
                    return SLURM_TESTS[0]
                return POOL_TESTS if file.startswith(POOL_TESTS) else file

        return FileScheduling(config, log)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line that says what this run did not run, and why."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "no reason given"
        for report in terminalreporter.stats.get("skipped", [])
    )
    left_out = config.stash.get(LEFT_OUT, 0)
    lines = [f"{left_out} nightly tests (make test-all runs them)"] if left_out else []
    lines += [f"{count} skipped ({reason})" for reason, count in sorted(reasons.items())]
    terminalreporter.write_line("Left out: " + ("; ".join(lines) or "nothing"))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def cli() -> Iterator[ForkServer]:
    """Runs `trainyard` commands in forks of one warm process."""
    server = ForkServer(SHARED_SERVER)
    yield server
    server.close()

"""A run that cannot fit is refused before its weights are allocated; one that may not fit gets a warning."""

from pathlib import Path

import pytest

from tests.support import configs
from tests.support.forkserver import ForkServer
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.constants import MIB
from trainyard.core.errors import UserError
from trainyard.devices import DEVICES
from trainyard.devices.cpu import CpuDevice
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.memory.peak import estimate_memory
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.problems import check_fits


class DeviceWithMemory(CpuDevice):
    """A CPU with a given number of bytes per rank."""

    def __init__(self, available: float | None) -> None:
        self.available_bytes = available

    def memory_per_rank(self, ranks: int) -> int | None:  # type: ignore[override]
        return None if self.available_bytes is None else int(self.available_bytes)


def make_case(**train: object) -> tuple[Config, Layout, int]:
    """A configuration with mostly activations, so that recomputing helps; and the bytes that it needs."""
    model = {**configs.LLAMA, "layers": 8, "max_positions": 512}
    section = {"micro_batch": 8, "global_batch": 8, **train}
    config = configs.tiny_config(model, data={"seq_len": 512}, train=section)
    layout = Layout.from_config(config, 1)
    return config, layout, needed_bytes(config, layout)


def needed_bytes(config: Config, layout: Layout) -> int:
    return estimate_memory(PlannedRun(config, layout, DEVICES.find("cpu")), 0).total


def warnings(config: Config, layout: Layout, available: float | None) -> list[str]:
    lines: list[str] = []
    check_fits(config, layout, DeviceWithMemory(available), lines.append)
    return lines


def test_run_that_fits_has_no_warning() -> None:
    config, layout, needed = make_case()
    assert warnings(config, layout, needed / 0.94) == []
    assert warnings(config, layout, None) == []


def test_run_that_may_not_fit_has_a_warning_with_a_fix() -> None:
    config, layout, needed = make_case()
    for available in (needed / 0.96, needed / 1.29):
        (line,) = warnings(config, layout, available)
        assert line.startswith("note: memory: a rank needs about 0.")
        assert "nearest: " in line


def test_run_that_cannot_fit_is_refused_with_a_fix_that_fits() -> None:
    config, layout, needed = make_case()
    with pytest.raises(UserError, match="nearest: ") as caught:
        warnings(config, layout, needed / 1.31)
    overrides = str(caught.value).rpartition("nearest: ")[2].split(" (")[0].split()
    fixed = parse(config.model_dump(mode="json"), overrides)
    assert needed_bytes(fixed, layout) <= 0.95 * needed / 1.31
    with pytest.raises(UserError, match="no single change makes it fit"):
        warnings(config, layout, MIB)


@pytest.mark.parametrize("source", ["synthetic", "hdf5"])
def test_run_on_packed_files_is_not_refused(source: str) -> None:
    """The padding of files is unknown, so that the estimate takes their samples for full."""
    config = configs.tiny_config("bert", data={"source": source, "paths": ["a.hdf5"] if source == "hdf5" else []})
    lines: list[str] = []
    device = DeviceWithMemory(MIB)
    device.kind = DEVICES.find("cuda")
    if source == "synthetic":
        with pytest.raises(UserError, match="memory: "):
            check_fits(config, Layout.from_config(config, 1), device, lines.append)
    else:
        check_fits(config, Layout.from_config(config, 1), device, lines.append)
        assert lines[0].startswith("note: memory: ")


def test_run_with_a_custom_loss_is_not_checked() -> None:
    config, layout, _ = make_case(loss="mine:loss")
    assert warnings(config, layout, MIB) == []


def test_ranks_share_the_memory_of_a_cpu() -> None:
    assert CpuDevice().memory_per_rank(4) == CpuDevice().memory_per_rank(1) // 4


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.nightly)])
def test_70b_on_a_laptop_is_a_one_line_error(ranks: str, tmp_path: Path, cli: ForkServer) -> None:
    overrides = ["layout.tp=1", "layout.pp=1", "data.source=synthetic", "device.name=cpu"]
    done = cli.run(["train", "llama3-70b", *overrides, "--nproc", ranks], cwd=tmp_path, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "memory: a rank needs about 1" in done.stderr

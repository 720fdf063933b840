"""A run that cannot fit is refused before its weights are made; one that may not is told so."""

from pathlib import Path

import pytest

from tests.cli.test_cli import run
from tests.support import configs
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.devices.cpu import CpuDevice
from trainyard.parallel.layout import Layout
from trainyard.plan.fit_check import check_fits
from trainyard.plan.memory.peak import estimate_memory

MIB = 2**20


class Small(CpuDevice):
    def __init__(self, room: float | None) -> None:
        self.room = room

    def memory_per_rank(self, ranks: int) -> int | None:  # type: ignore[override]
        return None if self.room is None else int(self.room)


def case(**train: object) -> tuple[Config, Layout, int]:
    """Most of it activations, so that recomputing helps."""
    model = {**configs.LLAMA, "layers": 8, "max_positions": 512}
    given = {"micro_batch": 8, "global_batch": 8, **train}
    config = configs.tiny_config(model, data={"seq_len": 512}, train=given)
    layout = Layout.from_config(config, 1)
    return config, layout, estimate_memory(config, layout, 0, "cpu").total


def said(config: Config, layout: Layout, room: float | None) -> list[str]:
    lines: list[str] = []
    check_fits(config, layout, Small(room), lines.append)
    return lines


def test_what_fits_is_not_talked_about() -> None:
    config, layout, needed = case()
    assert said(config, layout, needed / 0.94) == []
    assert said(config, layout, None) == []


def test_what_may_not_fit_is_said_with_the_least_change_that_does() -> None:
    config, layout, needed = case()
    for room in (needed / 0.96, needed / 1.29):
        (line,) = said(config, layout, room)
        assert line.startswith("note: memory: a rank needs about 0.")
        assert "nearest: " in line


def test_what_cannot_fit_is_refused() -> None:
    config, layout, needed = case()
    with pytest.raises(UserError, match="nearest: ") as caught:
        said(config, layout, needed / 1.31)
    words = str(caught.value).rpartition("nearest: ")[2].split(" (")[0].split()
    fitting = parse(config.model_dump(mode="json"), words)
    assert estimate_memory(fitting, layout, 0, "cpu").total <= 0.95 * needed / 1.31
    with pytest.raises(UserError, match="no single change makes it fit"):
        said(config, layout, MIB)


@pytest.mark.parametrize("source", ["synthetic", "hdf5"])
def test_padding_is_not_known_before_it_is_read(source: str) -> None:
    """Where samples are packed, the plan takes those of a file for full."""
    config = configs.tiny_config("bert", data={"source": source, "paths": ["a.hdf5"] if source == "hdf5" else []})
    lines: list[str] = []
    device = Small(MIB)
    device.memory_model = "gpu"
    if source == "synthetic":
        with pytest.raises(UserError, match="memory: "):
            check_fits(config, Layout.from_config(config, 1), device, lines.append)
    else:
        check_fits(config, Layout.from_config(config, 1), device, lines.append)
        assert lines[0].startswith("note: memory: ")


def test_nothing_is_known_of_a_loss_of_ones_own() -> None:
    config, layout, _ = case(loss="mine:loss")
    assert said(config, layout, MIB) == []


def test_ranks_share_the_memory_of_a_cpu() -> None:
    assert CpuDevice().memory_per_rank(4) == CpuDevice().memory_per_rank(1) // 4


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_seventy_billion_weights_do_not_fit_a_laptop(ranks: str, tmp_path: Path) -> None:
    words = ["layout.tp=1", "layout.pp=1", "data.source=synthetic", "device.name=cpu", "--nproc", ranks]
    done = run("train", "llama3-70b", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "memory: a rank needs about 1" in done.stderr

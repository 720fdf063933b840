"""Ranks of XLA as separate processes: the real device set-up and the real mesh."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.xla.conftest import TIMEOUT_S, VARIABLES
from trainyard.core.world import World
from trainyard.launch.launcher import reserved_port

ROOT = Path(__file__).parents[2]


def start(arguments: list[str], **variables: str) -> subprocess.Popen[str]:
    environ = {**os.environ, **VARIABLES, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", *arguments]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_are_one_world() -> None:
    """Guards against ranks that do not add up: torch_xla omits every collective unless replication is set up, which
    joining the process group does not do. Objects travel on a group of the host, and compile nothing."""
    with reserved_port() as port:
        worlds = [World(rank, 2, rank, 2, "127.0.0.1", port).torchrun_variables() for rank in range(2)]
        ranks = [start(["tests.xla.two_processes"], CPU_NUM_DEVICES="2", **variables) for variables in worlds]
        try:
            outcomes = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outcomes
    results: list[dict[str, Any]] = [json.loads(output.splitlines()[-1]) for output, _ in outcomes]
    collectives = {(kind, "{0,1}") for kind in ("all-reduce", "all-gather", "reduce-scatter")}
    for rank, result in enumerate(results):
        assert (result["rank"], result["size"]) == (rank, 2)
        for lowered in result["lowered"].values():
            assert {(kind, groups) for kind, groups in lowered} == collectives
        assert result["dp"] == 1
        assert result["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert result["broadcast"] == "of rank 0"
        assert result["compiled"] == 0


def test_a_world_that_torch_xla_does_not_see_is_refused(tmp_path: Path) -> None:
    """On a CPU each process has a world of its own: training would go on without any exchange of gradients."""
    arguments = ["trainyard", "train", "tiny-llama", "--smoke", "--nproc", "2", f"log.directory={tmp_path}"]
    process = start([*arguments, "device.name=xla"])
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2, errors
    (line,) = (line for line in errors.splitlines() if line.startswith("trainyard: ") and "logs of" not in line)
    assert "of 2, but torch_xla sees device 0 of 1 (PJRT_DEVICE=CPU): collectives would not reach all ranks" in line
    assert not list(tmp_path.iterdir())

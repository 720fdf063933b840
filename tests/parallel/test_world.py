"""World: read from the launcher's variables by commands, passed explicitly everywhere else."""

import pytest

from tests.support import configs
from trainyard.core.errors import UserError
from trainyard.devices.cpu import CpuDevice
from trainyard.dryrun.dry_run import dry_run
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.world import World


def test_the_launchers_variables() -> None:
    assert World.from_environment({}) == World(0, 1, 0, 1)
    variables = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert World.from_environment(variables) == World(9, 16, 1, 8)
    with pytest.raises(UserError, match=r"RANK=x WORLD_SIZE=2 .*: must be integers"):
        World.from_environment({"RANK": "x", "WORLD_SIZE": "2"})


def test_an_explicit_world_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    mesh = Mesh.create(Layout(), CpuDevice(), World(local_rank=3))
    assert (mesh.layout_rank, mesh.world.size, mesh.local_rank) == (0, 1, 3)


def test_dry_runs_of_several_ranks_in_one_process() -> None:
    config = configs.tiny_config(layout={"tp": 2}, train={"global_batch": 4, "micro_batch": 1})
    meshes = []
    for rank in (0, 3, 1):
        with dry_run(config, rank, 4) as trainer:
            meshes.append(trainer.mesh)
    assert [mesh.coords for mesh in meshes] == [Layout(tp=2, dp=2).coords(rank) for rank in (0, 3, 1)]
    assert [mesh.tp.ranks for mesh in meshes] == [(0, 1), (2, 3), (0, 1)]
    assert [mesh.dp_cp.ranks for mesh in meshes] == [(0, 2), (1, 3), (1, 3)]

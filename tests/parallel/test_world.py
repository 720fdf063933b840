"""The ranks of a run: a World that is passed explicitly, and how real ranks meet."""

import os
from datetime import timedelta
from threading import Thread
from unittest.mock import patch

import pytest

from tests.support import configs
from trainyard.core.errors import UserError
from trainyard.core.world import World
from trainyard.devices.cpu import CpuDevice
from trainyard.launch.launcher import reserved_port
from trainyard.parallel import rendezvous
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import Mesh
from trainyard.preflight.dryrun.dry_run import dry_run


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


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A free port, and a wait of a second for the other ranks instead of ten minutes."""
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_TIMEOUT", timedelta(seconds=1))
    with patch.dict(os.environ), reserved_port() as port:
        yield port


def test_a_rank_that_never_starts_ends_the_wait_with_one_line(port: int) -> None:
    with pytest.raises(UserError, match=rf"MASTER_PORT={port}: rank 0 of 2 cannot meet the others: .*1/2 clients"):
        rendezvous.meet_all_ranks(World(0, 2, 0, 2, "127.0.0.1", port))


def test_an_address_without_rank_0_ends_the_wait_with_one_line(port: int) -> None:
    with pytest.raises(UserError, match=rf"MASTER_PORT={port}: rank 1 of 2 cannot meet the others: .*") as caught:
        rendezvous.meet_all_ranks(World(1, 2, 1, 2, "127.0.0.1", port))
    assert "\n" not in str(caught.value)


def test_two_processes_with_one_rank_are_an_error(port: int) -> None:
    """Two runs that share a port, or a wrong RANK: the second process would take part in the wrong run."""
    worlds = [World(rank, 2, rank, 2, "127.0.0.1", port) for rank in range(2)]
    stores = []
    threads = [Thread(target=lambda world=world: stores.append(rendezvous.meet_all_ranks(world))) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 2
    with pytest.raises(UserError, match="another process is rank 1 too"):
        rendezvous.meet_all_ranks(worlds[1])

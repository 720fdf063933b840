"""World: ranks as torchrun, Slurm and MPI assign them. A rank that is not recognized would train a model of its own."""

import json
from pathlib import Path

import pytest

from trainyard.core.errors import UserError
from trainyard.core.world import World

CAPTURED = json.loads((Path(__file__).parent / "launcher_variables.json").read_text())
"""Variables of real launchers; the key is the command."""
TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "h"}
BATCH = CAPTURED["sbatch -N2 -n4"][0]


@pytest.mark.parametrize(
    ("command", "coordinates", "address"),
    [
        ("srun -N2 -n3", [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)], "n1"),
        ("sbatch -N2 -n4: srun -N2 -n3", [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)], "n1"),
        ("sbatch -N2 -n4: srun -N1 -n2", [(0, 2, 0, 2), (1, 2, 1, 2)], "127.0.0.1"),
        ("sbatch -N2 -n4: srun --mpi=pmi2 -n2", [(0, 2, 0, 1), (1, 2, 0, 1)], "n1"),
        ("mpirun -n 2 (Open MPI)", [(0, 2, 0, 2), (1, 2, 1, 2)], "127.0.0.1"),
        ("mpiexec -n 2 (MPICH)", [(0, 2, 0, 2), (1, 2, 1, 2)], "127.0.0.1"),
    ],
)
def test_ranks_of_real_launchers(command: str, coordinates: list[tuple[int, ...]], address: str) -> None:
    """Guards against two processes of one job that both believe to be alone. All meet at the host of rank 0, which is
    not the host of srun (SLURM_LAUNCH_NODE_IPADDR)."""
    worlds = [World.from_environment(variables) for variables in CAPTURED[command]]
    assert [(world.rank, world.size, world.local_rank, world.local_size) for world in worlds] == coordinates
    assert {world.master_addr for world in worlds} == {address}
    assert len({world.master_port for world in worlds}) == 1
    assert 60999 < worlds[0].master_port < 65535


@pytest.mark.parametrize("command", ["sbatch -N2 -n4", "srun --pty -n2", "salloc -n2"])
def test_the_shell_of_a_job_is_one_process(command: str) -> None:
    """SLURM_NTASKS is set there too, but no other ranks exist: waiting for them would hang."""
    (variables,) = CAPTURED[command]
    assert int(variables["SLURM_NTASKS"]) > 1
    assert World.from_environment(variables) == World()
    assert World.from_environment({**variables, "SLURM_STEP_ID": "4294967290"}) == World()


def test_mpi_inside_slurm() -> None:
    """mpirun in a batch script: the ranks have Slurm's variables of the script, or of the step of MPI's daemons."""
    ranks = CAPTURED["mpirun -n 2 (Open MPI)"]
    step = CAPTURED["sbatch -N2 -n4: srun -N2 -n3"][0]
    on_two_hosts = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    first = World.from_environment({**BATCH, **ranks[0], **on_two_hosts})
    second = World.from_environment({**step, **ranks[1], **on_two_hosts, "SLURM_STEP_NODELIST": "n2"})
    assert (first.rank, second.rank) == (0, 1)
    assert (first.master_addr, first.master_port) == (second.master_addr, second.master_port)
    assert first.master_addr == "n1"


def test_jobs_on_one_host_use_different_ports() -> None:
    (variables, _) = CAPTURED["sbatch -N2 -n4: srun -N1 -n2"]
    steps = {World.from_environment({**variables, "SLURM_STEP_ID": str(step)}).master_port for step in range(50)}
    assert len(steps) > 45
    assert all(port % 2 == 0 for port in steps), "the next port is free for the device"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n[01-04,07],m1", "n01"),
        ("trn1-dy-queue1-i1-[3-16]", "trn1-dy-queue1-i1-3"),
        ("rack[0-1]n[00-15]", "rack0n00"),
        ("b,a[1-2]", "b"),
        ("ip-10-0-0-1", "ip-10-0-0-1"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    variables = {**CAPTURED["srun -N2 -n3"][2], "SLURM_STEP_NODELIST": nodes}
    assert World.from_environment(variables).master_addr == first
    assert World.from_environment({**variables, "MASTER_ADDR": "mine", "MASTER_PORT": "5000"}).master_addr == "mine"


def test_tasks_per_node() -> None:
    variables = {**CAPTURED["srun -N2 -n3"][0], "SLURM_NTASKS": "12", "SLURM_STEP_TASKS_PER_NODE": "2(x3),5,1"}
    sizes = [World.from_environment({**variables, "SLURM_NODEID": str(node)}).local_size for node in range(5)]
    assert sizes == [2, 2, 2, 5, 1]


def test_torchrun() -> None:
    world = World.from_environment({**TORCHRUN, "MASTER_PORT": "29500"})
    assert world == World(9, 16, 1, 8, "h", 29500)
    assert world.hosts == 2
    assert World.from_environment(world.torchrun_variables()) == world
    assert World.from_environment({**BATCH, **world.torchrun_variables()}) == world, "torchrun in a batch script"
    assert World.from_environment({}) == World.from_environment({"RANK": "0", "WORLD_SIZE": "1"}) == World()


def test_without_local_variables_all_ranks_are_on_one_host() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert World.from_environment(variables) == World(3, 4, 3, 4, "h", 1)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2: MASTER_ADDR is not set; set MASTER_ADDR to the host of rank"),
        ({**TORCHRUN}, "WORLD_SIZE=16: MASTER_PORT is not set"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000: must be an integer, 1 to 65535"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5: must be an integer, 0 to 1, because of WORLD_SIZE"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1: must be an integer, 0 to 1"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1: must be an integer, 0 to 0"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0: must be an integer, 1 or more"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x: must be an integer"),
        ({"WORLD_SIZE": "2"}, "RANK is not set, although"),
        ({"RANK": "1"}, "WORLD_SIZE is not set, although"),
        ({**TORCHRUN, "LOCAL_RANK": "8"}, "LOCAL_RANK=8: must be an integer, 0 to 7, because of LOCAL_WORLD_SIZE"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_NTASKS=2: MASTER_ADDR is not set"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_SIZE=2: MASTER_ADDR is not set"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({**CAPTURED["srun -N2 -n3"][0], "SLURM_STEP_TASKS_PER_NODE": "2(y3)"}, "SLURM_TASKS_PER_NODE=2.y3.: not a"),
    ],
)
def test_incomplete_variables_are_an_error(variables: dict[str, str], message: str) -> None:
    """Guards against tracebacks of torch and against ranks that wait half an hour for others."""
    with pytest.raises(UserError, match=message):
        World.from_environment(variables)

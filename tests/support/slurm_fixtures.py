"""The Slurm cluster as a fixture for all tests."""

from collections.abc import Iterator

import pytest

from tests.support.slurm_cluster import SlurmCluster, missing_for_cluster, temporary_cluster

NUM_NODES = 4


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    if reason := missing_for_cluster():
        pytest.skip(f"no Slurm cluster: {reason}")
    with temporary_cluster(NUM_NODES) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster with all nodes idle. Jobs that a test leaves are cancelled, and nodes that it killed start again."""
    environment = dict(slurm_cluster.environment)
    yield slurm_cluster
    slurm_cluster.environment = environment
    slurm_cluster.recover()

"""Errors of the CUDA device that any machine can test."""

import pytest

from trainyard.core.errors import UserError
from trainyard.core.world import World
from trainyard.devices.cuda import CudaDevice, device_index


def test_more_ranks_than_gpus_is_an_error() -> None:
    device = CudaDevice()
    with pytest.raises(UserError, match=rf"local rank 99: this machine has {device.max_local_ranks()} GPUs"):
        device.prepare(False, World(99, 100, 99, 100))


@pytest.mark.parametrize(
    ("local_rank", "visible", "on_node", "index"),
    [(3, 8, None, 3), (3, 8, "8", 3), (3, 1, "8", 0), (3, 2, "8", 0), (1, 2, "8", 1)],
)
def test_ranks_that_slurm_binds_to_a_gpu_use_it(local_rank: int, visible: int, on_node: str | None, index: int) -> None:
    """With srun --gpus-per-task a rank sees only its own GPUs, so the local rank is not the index of its GPU."""
    assert device_index(local_rank, visible, {"SLURM_GPUS_ON_NODE": on_node} if on_node else {}) == index

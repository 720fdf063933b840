"""Errors of the CUDA device that any machine can test."""

import pytest

from trainyard.core.errors import UserError
from trainyard.devices.cuda import CudaDevice


def test_more_ranks_than_gpus_is_an_error() -> None:
    device = CudaDevice()
    with pytest.raises(UserError, match=rf"local rank 99: this machine has {device.max_local_ranks()} GPUs"):
        device.prepare(False, 99)

"""Makes short runs cheaper: none of these tests checks durability, garbage collection or MFU."""

import os
from contextlib import nullcontext

import pytest

from trainyard.devices.base import PeakThroughput
from trainyard.devices.cpu import CpuDevice
from trainyard.run import trainer


@pytest.fixture(autouse=True)
def _cheap_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(trainer, "quiet_garbage_collector", nullcontext)
    monkeypatch.setattr(CpuDevice, "peak_throughput", lambda self, dtype: PeakThroughput(1e12, "not measured"))

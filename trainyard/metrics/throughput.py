"""Throughput since the last logged step: time per step, tokens and sequences per second, and MFU in two conventions."""

import time
from typing import Any

from trainyard.devices.base import PeakThroughput
from trainyard.families.flops import SampleFlops


class ThroughputMeter:
    """Measures steps over intervals that start with `start` and end with `read`."""

    def __init__(
        self, global_batch: int, seq_len: int, flops: SampleFlops, peak: PeakThroughput | None, ranks: int = 1
    ) -> None:
        self.global_batch, self.seq_len = global_batch, seq_len
        self.flops = flops
        self.peak = peak
        self.ranks = ranks
        self.started_at = time.perf_counter()
        self.last_step = 0

    def start(self, completed_steps: int) -> None:
        """Start a new interval, so that work between steps (logging, evaluation) does not count."""
        self.started_at, self.last_step = time.perf_counter(), completed_steps

    def read(self, step: int) -> dict[str, Any]:
        """Metrics of the interval that ends with `step`. `mfu` counts full attention, `mfu_causal` half of it."""
        seconds = (time.perf_counter() - self.started_at) / max(step - self.last_step, 1)
        sequences = self.global_batch / seconds
        record = {
            "ms_per_iteration": seconds * 1000,
            "tokens_per_second": sequences * self.seq_len,
            "sequences_per_second": sequences,
            "tflops_per_second": sequences * self.flops.full_attention / 1e12,
        }
        if self.peak:
            peak = self.peak.flops * self.ranks
            record["mfu"] = sequences * self.flops.full_attention / peak
            record["mfu_causal"] = sequences * self.flops.causal_attention / peak
        return record

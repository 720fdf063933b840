"""Speed over the steps since the last look: time per step, tokens and sequences a second, MFU in both conventions."""

import time
from typing import Any

from trainyard.config.schema import Config
from trainyard.devices import Peak
from trainyard.models.flops import Flops


class Meter:
    def __init__(self, config: Config, flops: Flops, peak: Peak | None, ranks: int = 1) -> None:
        self.config = config
        self.flops = flops
        self.peak = peak
        self.ranks = ranks
        self.since = time.perf_counter()
        self.step = 0

    def start(self) -> None:
        """Begin a new stretch of steps now (what was done outside the steps is not counted)."""
        self.since = time.perf_counter()

    def read(self, step: int) -> dict[str, Any]:
        steps, self.step = max(step - self.step, 1), step
        seconds = (time.perf_counter() - self.since) / steps
        sequences = self.config.train.global_batch / seconds
        record = {
            "ms_per_iteration": seconds * 1000,
            "tokens_per_second": sequences * self.config.data.sequence,
            "sequences_per_second": sequences,
            "tflops_per_second": sequences * self.flops.full / 1e12,
        }
        if self.peak:
            peak = self.peak.flops * self.ranks
            record["mfu"] = sequences * self.flops.full / peak
            record["mfu_causal"] = sequences * self.flops.causal / peak
        return record

"""Throughput since the last logged step: time per step, tokens and sequences per second, and MFU in two conventions."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from trainyard.devices.base import PeakThroughput
from trainyard.families.flops import SampleFlops


class ThroughputMeter:
    """Measures steps over intervals that start with `start` and end with `read`."""

    def __init__(
        self,
        global_batch: int,
        count_steps: Callable[[int, int], Mapping[int, int]],
        flops: Mapping[int, SampleFlops],
        peak: PeakThroughput | None,
        ranks: int = 1,
    ) -> None:
        """`count_steps(first, end)` counts the steps after `first` up to `end` by the length of their samples; `flops`
        are those of a sample of each length."""
        self.global_batch, self.count_steps = global_batch, count_steps
        self.flops = flops
        self.peak = peak
        self.consumed_tokens, self.counted_steps = 0, 0
        self.ranks = ranks
        self.started_at = time.perf_counter()
        self.last_step = 0

    def start(self, completed_steps: int) -> None:
        """Start a new interval, so that work between steps (logging, evaluation) does not count."""
        self.started_at, self.last_step = time.perf_counter(), completed_steps

    def count_tokens(self, step: int) -> int:
        """The tokens of all steps up to `step`, which must not be less than the last time, padding included."""
        counts = self.count_steps(self.counted_steps, step)
        self.consumed_tokens += self.global_batch * sum(length * count for length, count in counts.items())
        self.counted_steps = step
        return self.consumed_tokens

    def read(self, step: int) -> dict[str, Any]:
        """Metrics of the interval that ends with `step`. `mfu` counts full attention, `mfu_causal` half of it."""
        steps = max(step - self.last_step, 1)
        seconds = (time.perf_counter() - self.started_at) / steps
        sequences = self.global_batch / seconds
        shares = {length: count / steps for length, count in self.count_steps(step - steps, step).items()}
        full = sum(self.flops[length].full_attention * share for length, share in shares.items())
        causal = sum(self.flops[length].causal_attention * share for length, share in shares.items())
        record = {
            "ms_per_iteration": seconds * 1000,
            "tokens_per_second": sequences * sum(length * share for length, share in shares.items()),
            "sequences_per_second": sequences,
            "tflops_per_second": sequences * full / 1e12,
        }
        if self.peak:
            peak = self.peak.flops * self.ranks
            record["mfu"] = sequences * full / peak
            record["mfu_causal"] = sequences * causal / peak
        return record

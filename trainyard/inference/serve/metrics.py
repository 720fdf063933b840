"""What /metrics reports, in the text format of Prometheus."""

import bisect
import itertools
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from trainyard.inference.requests import SchedulerLoad

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)
"""Upper bounds of the buckets of histograms."""


@dataclass
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    sum: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def samples(self) -> Iterable[tuple[str, float]]:
        """Endings of names, and values."""
        for bound, count in zip((*SECONDS, "+Inf"), itertools.accumulate(self.counts), strict=True):
            yield f'_bucket{{le="{bound}"}}', count
        yield "_sum", self.sum
        yield "_count", sum(self.counts)


@dataclass
class RunningSequence:
    begin: float
    has_token: bool = False


class ServerMetrics:
    """Counts sequences: a request with n=4 is four of them. Lives in the event loop."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = 0
        self.ends = Counter({"stop": 0, "length": 0, "abort": 0})
        """Sequences by the reason of their end; abort: cancelled, or failed."""
        self.time_to_first_token, self.latency = Histogram(), Histogram()
        self._running: dict[int, RunningSequence] = {}

    def on_submit(self, request_id: int, prompt_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        self._running[request_id] = RunningSequence(time.monotonic())

    def on_token(self, request_id: int, cached_tokens: int) -> None:
        self.generated_tokens += 1
        running = self._running.get(request_id)
        if running and not running.has_token:
            running.has_token = True
            self.cached_tokens += cached_tokens
            self.time_to_first_token.observe(time.monotonic() - running.begin)

    def on_end(self, request_id: int, reason: str) -> None:
        self.ends[reason] += 1
        self.latency.observe(time.monotonic() - self._running.pop(request_id).begin)

    def render(self, load: SchedulerLoad) -> str:
        """All metrics. `load` is what the scheduler has now."""
        lines: list[str] = []

        def add(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> None:
            lines.extend((f"# HELP trainyard_{name} {text}", f"# TYPE trainyard_{name} {kind}"))
            lines.extend(f"trainyard_{name}{suffix} {value}" for suffix, value in samples)

        ends = [(f'{{finish_reason="{reason}"}}', number) for reason, number in self.ends.items()]
        add("sequences_total", "counter", "Sequences that ended, by reason.", ends)
        for name, text, number in [
            ("prompt_tokens_total", "Tokens of the prompts of all sequences.", self.prompt_tokens),
            ("prompt_tokens_cached_total", "Prompt tokens that were found in the cache.", self.cached_tokens),
            ("generated_tokens_total", "Tokens generated.", self.generated_tokens),
        ]:
            add(name, "counter", text, [("", number)])
        for name, text, value in [
            ("sequences_running", "Sequences in the batch.", load.running),
            ("sequences_waiting", "Sequences that wait for a place in the batch.", load.waiting),
            ("cache_usage_ratio", "Part of the cache that the sequences in the batch use.", load.cache_usage),
        ]:
            add(name, "gauge", text, [("", value)])
        first, latency = self.time_to_first_token, self.latency
        add("time_to_first_token_seconds", "histogram", "From a request to its first token.", first.samples())
        add("sequence_latency_seconds", "histogram", "From a request to the end of a sequence.", latency.samples())
        return "\n".join(lines) + "\n"

"""One trial of a tuning search: the choice of settings it ran, how it ended, how fast it was."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trainyard.metrics.json_lines import read_json_lines

Choice = dict[str, Any]
"""A value for every tuned key, by dotted key."""

WARMUP_STEPS = 2
"""Leading steps of a trial that are not timed: they compile and select kernels and grow the memory pool."""
DONE, OUT_OF_MEMORY, TOO_SLOW = "done", "out of memory", "too slow"
OUT_OF_MEMORY_PATTERNS = ("outofmemory", "out of memory", "allocate memory", "memoryerror")


@dataclass(frozen=True)
class Trial:
    """A choice and its measurements."""

    choice: Choice
    outcome: str
    """done, out of memory, too slow, or the reason of the failure."""
    seconds: float
    """Lifetime of the trial's process."""
    tokens_per_second: float = 0.0
    """Median over the timed steps; 0 unless the outcome is done."""
    peak_bytes: int = 0
    """Peak memory of rank 0, bytes."""
    first_step_seconds: float = 0.0
    """Duration of the first step, which includes compilation."""

    @property
    def ran_out_of_memory(self) -> bool:
        return self.outcome == OUT_OF_MEMORY


def trial_from_process(
    choice: Choice, returncode: int, in_time: bool, seconds: float, stderr: str, metrics: Path
) -> Trial:
    """Build the trial of a finished process from its exit code, the end of its stderr and its metrics.jsonl."""
    if not in_time:
        return Trial(choice, TOO_SLOW, seconds)
    if returncode == 0:
        records = [record for record in read_json_lines(metrics).records if "tokens_per_second" in record]
        timed = records[min(WARMUP_STEPS, len(records) - 1) :]
        return Trial(
            choice,
            DONE,
            seconds,
            tokens_per_second=median(record["tokens_per_second"] for record in timed),
            peak_bytes=max(record["memory_bytes"] for record in records),
            first_step_seconds=records[0]["ms_per_iteration"] / 1000,
        )
    if returncode == -9 or any(pattern in stderr.lower() for pattern in OUT_OF_MEMORY_PATTERNS):
        return Trial(choice, OUT_OF_MEMORY, seconds)
    lines = [line for line in stderr.splitlines() if line.strip() and "logs of all ranks" not in line]
    reason = lines[-1].strip().removeprefix("trainyard: ") if lines else f"exit code {returncode}"
    return Trial(choice, reason, seconds)

"""The interface of loggers: what receives the metrics, text samples and events of a run while it trains."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.core.quantities import counted
from trainyard.metrics.json_lines import as_number, read_json_lines

METRICS_FILE, SAMPLES_FILE, EVENTS_FILE = "metrics.jsonl", "samples.jsonl", "events.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"


class Logger:
    """Base class with empty methods. A logger is created without arguments, for rank 0 only; its `__init__` is the
    place to import libraries.

    Loggers live in a process of their own, each with a thread that calls its methods one after the other: the run does
    not wait for them. An exception is reported as one warning and disables the logger; the run continues without it.
    """

    @classmethod
    def check(cls) -> None:
        """Called in the process of the run, before it builds anything. Raise `UserError` to refuse the run."""

    def start(self, run: "LoggedRun") -> None:
        """The run starts, or resumes."""

    def log(self, step: int, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl: a training step, an evaluation (`evaluate/NAME`) or a checkpoint."""

    def log_samples(self, step: int, records: list[dict[str, Any]]) -> None:
        """The text samples of one step, as in samples.jsonl."""

    def log_event(self, step: int, event: dict[str, Any]) -> None:
        """A line of events.jsonl: `event` names its kind."""

    def close(self, outcome: str) -> None:
        """The run is over: `completed`, `interrupted` or `failed`, also if its process was killed."""


@dataclass(frozen=True)
class LoggedRun:
    """A run as loggers see it."""

    directory: Path
    run_id: str
    """Unique to the run; a run that resumes in its directory keeps it."""
    config: dict[str, Any]
    """The resolved configuration as plain data."""
    resumed_step: int = 0
    """The step from which the run resumes; 0 if it starts. Later steps are logged again."""
    continues: bool = False
    """True if an earlier process has logged to the directory."""

    def replay(self, target: Logger, first_step: int) -> None:
        """Log what the files of the run say about steps from `first_step` to `resumed_step`, in order of steps.

        For a logger that an earlier process did not have, or that lost its last records when that process was killed.
        """
        calls: list[tuple[int, str, Any]] = []
        for record in read_json_lines(self.directory / METRICS_FILE).records:
            calls.append((record["step"], "log", record))
        samples: dict[int, list[dict[str, Any]]] = {}
        for record in read_json_lines(self.directory / SAMPLES_FILE).records:
            samples.setdefault(record["step"], []).append(record)
        calls += [(step, "log_samples", records) for step, records in samples.items()]
        for record in read_json_lines(self.directory / EVENTS_FILE).records:
            if record.get("event") not in ("start", "end"):
                calls.append((record["step"], "log_event", record))
        for step, method, content in sorted(calls, key=lambda call: call[0]):
            if first_step <= step <= self.resumed_step:
                getattr(target, method)(step, content)


@dataclass(frozen=True)
class LoggedSteps:
    """What a metrics service already has of a run: every step before `last`, and of `last` itself the names `names`."""

    last: int = 0
    names: frozenset[str] = frozenset()

    def new_values(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """The values that the service does not have yet."""
        if step > self.last:
            return values
        return {name: value for name, value in values.items() if step == self.last and name not in self.names}


def scalar_tags(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record by tag: `train/loss`, `evaluate/loss`."""
    return {
        name if "/" in name else f"train/{name}": number
        for name, value in record.items()
        if name not in ("step", "time") and (number := as_number(value)) is not None
    }


def flat_config(config: dict[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """The values of a configuration by dotted key; lists as text, keys without a value left out."""
    flat: dict[str, bool | int | float | str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= flat_config(value, f"{prefix}{name}.")
        elif value is not None:
            flat[prefix + name] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def event_text(event: dict[str, Any], max_samples: int | None = None) -> str:
    """One line about an event, with at most `max_samples` indices of samples."""
    kind, samples = event["event"], event.get("samples", [])
    shown = samples[:max_samples]
    more = f" and {len(samples) - len(shown)} more" if len(samples) > len(shown) else ""
    batch = f"; samples {', '.join(map(str, shown))}{more}" if samples else ""
    if kind == "loss_spike":
        return f"step {event['step']}: loss spike: {event['loss']:.4f}, expected {event['expected']:.4f}{batch}"
    if kind == "not_finite":
        return f"step {event['step']} skipped: {event['reason']}{batch}"
    if kind == "start":
        verb, ranks = (f"resumed after step {event['step']}" if event["resumed"] else "started"), event["ranks"]
        return f"{verb} on {event['host']} (pid {event['pid']}), {counted(ranks, 'rank')}"
    error = f": {event['error']}" if "error" in event else ""
    return f"step {event['step']}: {event['outcome']}{error}"

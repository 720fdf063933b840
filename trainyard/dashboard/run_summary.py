"""One line about a run: its status, how far it is, its loss and speed. Reads only the ends of its files."""

import re
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

from trainyard.dashboard.run_files import FileState, RunDirectoryReader
from trainyard.metrics.json_lines import parse_lines, to_count, to_finite
from trainyard.metrics.run_directory import IDENTITY_FILE, is_training

HEAD_BYTES = 1 << 12
TAIL_BYTES = 1 << 14
CONFIG_BYTES = 1 << 16
RECENT_S = 120.0
"""A run of another host, whose lock cannot be seen from here, is running if it has written in the last seconds."""
MAX_NOTE_CHARS = 400
WATCHED = ("metrics.jsonl", "events.jsonl", "config.yaml")
RUN_FILES = (IDENTITY_FILE, "config.yaml", "metrics.jsonl")
"""A directory with one of these files is a run."""
KILLED = "ended without writing its outcome: killed, or its host failed"
SECTION_VALUE = r"(?m)^{section}:[ \t]*\n(?:[ \t].*\n)*?[ \t]+{key}: (\d+)[ \t]*$"


@dataclass(frozen=True)
class RunRow:
    """A row of the list of runs."""

    name: str
    status: str
    """running, completed, interrupted, failed or unknown."""
    note: str = ""
    """More about the status, such as the error of a failed run."""
    step: int | None = None
    steps: int | None = None
    """Steps of the complete run."""
    loss: float | None = None
    loss_text: str = ""
    """The loss as the run wrote it, if it is not finite."""
    evaluation: float | None = None
    """Loss of the last evaluation."""
    tokens_per_second: float | None = None
    mfu: float | None = None
    started: float | None = None
    """Unix seconds, as `updated`."""
    updated: float | None = None
    device: str = ""
    ranks: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


WatchedState = tuple[FileState | None, ...]


def run_state(run: RunDirectoryReader) -> tuple[WatchedState, bool, bool]:
    """What changes when the summary of a run changes: its files, whether it trains, and whether it wrote recently."""
    states = tuple(run.state(name) for name in WATCHED)
    identity = run.state(IDENTITY_FILE)  # of a link or a pipe it is None, and the lock is not tried
    training = identity is not None and is_training(run.path)
    recent = any(state and time.time() - state.modified < RECENT_S for state in states[:2])
    return states, training, recent


def is_run(run: RunDirectoryReader) -> bool:
    return any(run.state(name) for name in RUN_FILES)


def read_summary(run: RunDirectoryReader, state: tuple[WatchedState, bool, bool]) -> RunRow:
    (metrics, _, _), training, recent = state
    first = next((record for record in _head(run, "metrics.jsonl") if "loss" in record), {})
    records = _tail(run, "metrics.jsonl")
    last = next((record for record in reversed(records) if "loss" in record), first)
    evaluated = (loss for record in reversed(records) if (loss := _evaluation_loss(record)) is not None)
    events = _tail(run, "events.jsonl")
    steps = read_config_number(run, "train", "steps")
    status, note = _status(events, training, recent)
    begun = next((event for event in _head(run, "events.jsonl") if event.get("event") == "start"), {})
    start = next((event for event in reversed(events) if event.get("event") == "start"), begun)
    loss = last.get("loss")
    identity = run.state(IDENTITY_FILE)  # written when the run starts for the first time
    return RunRow(
        run.name,
        status,
        note,
        to_count(last.get("step")),
        steps,
        to_finite(loss),
        loss if isinstance(loss, str) and to_finite(loss) is None and len(loss) < 5 else "",
        to_finite(next(evaluated, None)),
        to_finite(last.get("tokens_per_second")),
        to_finite(last.get("mfu")),
        to_finite(begun.get("time")) or to_finite(first.get("time")) or (identity.modified if identity else None),
        metrics.modified if metrics else None,
        _text(start.get("device") or first.get("device")),
        to_count(start.get("ranks") or first.get("ranks")),
    )


def _evaluation_loss(record: dict[str, Any]) -> Any:
    """The loss on the held-out samples, or else on the first of evaluate.sets; None if this is no evaluation."""
    return next((value for name, value in record.items() if re.fullmatch(r"evaluate/(\w+/)?loss", name)), None)


def _status(events: list[dict[str, Any]], training: bool, recent: bool) -> tuple[str, str]:
    if training:
        return "running", ""
    last = next((event for event in reversed(events) if event.get("event") in ("start", "end")), None)
    if last is None:
        return "unknown", ""
    if last["event"] == "end":
        outcome = last.get("outcome")
        known = isinstance(outcome, str) and outcome in ("completed", "interrupted", "failed")
        return (str(outcome) if known else "unknown"), _text(last.get("error"))
    host = last.get("host")
    if isinstance(host, str) and host and host != socket.gethostname():
        place = f"on {_text(host)}, whose lock cannot be seen from here"
        return ("running", place) if recent else ("unknown", f"last seen {place}")
    return "interrupted", KILLED


def _text(value: Any) -> str:
    return " ".join(value[:MAX_NOTE_CHARS].split()) if isinstance(value, str) else ""


def _head(run: RunDirectoryReader, name: str) -> list[dict[str, Any]]:
    return parse_lines(run.read_head(HEAD_BYTES, name).rpartition(b"\n")[0])


def _tail(run: RunDirectoryReader, name: str) -> list[dict[str, Any]]:
    return parse_lines(run.read_tail(TAIL_BYTES, name).rpartition(b"\n")[0])


def read_config_number(run: RunDirectoryReader, section: str, key: str) -> int | None:
    """A number of config.yaml as a run writes it. Parsing YAML takes milliseconds, which 200 runs have not."""
    text = run.read_head(CONFIG_BYTES, "config.yaml").decode(errors="replace")
    found = re.search(SECTION_VALUE.format(section=section, key=key), text)
    return to_count(int(found[1])) if found and len(found[1]) < 16 else None


def tokens_per_sample(run: RunDirectoryReader) -> int | None:
    return read_config_number(run, "data", "seq_len")

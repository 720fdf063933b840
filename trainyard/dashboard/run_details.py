"""The parts of a run that the dashboard shows on demand: configuration, events, checkpoints, logs."""

from typing import Any

import yaml

from trainyard.checkpoint.file_names import COMMIT_FILE, STEP_DIRECTORY
from trainyard.cluster.jobs import LOG_DIRECTORY
from trainyard.core.errors import UserError
from trainyard.core.yaml_io import format_value
from trainyard.dashboard.metrics_table import to_float
from trainyard.dashboard.run_files import RunDirectoryReader
from trainyard.metrics.json_lines import parse_lines, to_count, to_finite

MAX_CONFIG_BYTES = 1 << 16
"""Parsing this much YAML takes about a second."""
MAX_CONFIG_KEYS = 2000
MAX_CONFIG_DEPTH = 12
EVENTS_BYTES = 4 << 20
MAX_EVENTS = 500
"""The last events of a run are shown."""
MAX_SAMPLES = 64
"""Indices of the samples of an event that are shown."""
MAX_CHECKPOINTS = 200
CHECKPOINT_DIRECTORY = "checkpoints"
LOG_BYTES = 1 << 16
MAX_LOG_FILES = 500
EVENT_KINDS = ("loss_spike", "not_finite", "start", "end")


def read_config(run: RunDirectoryReader) -> dict[str, Any]:
    """The keys of config.yaml by dotted name, as text; or the `problem` with it."""
    if run.state("config.yaml") is None:
        return {"keys": {}, "problem": "this run has no config.yaml"}
    content = run.read_head(MAX_CONFIG_BYTES + 1, "config.yaml")
    if len(content) > MAX_CONFIG_BYTES:
        return {"keys": {}, "problem": f"config.yaml has more than {MAX_CONFIG_BYTES >> 10} KiB"}
    try:
        data = yaml.load(content.decode(), yaml.SafeLoader)  # the C loader crashes on deeply nested text
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        return {"keys": {}, "problem": f"config.yaml, line {line}: not valid YAML"}
    except (ValueError, OverflowError, RecursionError, TypeError, yaml.YAMLError):
        return {"keys": {}, "problem": "config.yaml is not valid YAML"}
    if not isinstance(data, dict):
        return {"keys": {}, "problem": "config.yaml is not a mapping"}
    keys: dict[str, str] = {}
    _flatten(data, "", keys, 0)
    return {"keys": keys}


def _flatten(value: Any, name: str, keys: dict[str, str], depth: int) -> None:
    """Stops at a number of keys: aliases of YAML can make a small file a huge tree."""
    if len(keys) >= MAX_CONFIG_KEYS:
        return
    if isinstance(value, dict) and value and depth < MAX_CONFIG_DEPTH:
        for key, inner in value.items():
            _flatten(inner, f"{name}.{_short(key)}" if name else _short(key), keys, depth + 1)
    elif isinstance(value, list | tuple | set | dict) and depth and _is_deep(value):
        keys[name] = "..."
    else:
        keys[name] = _short(value)


def _is_deep(value: Any) -> bool:
    """True for a list of lists or mappings, whose text can be very long."""
    items = value.values() if isinstance(value, dict) else value
    return len(value) > 100 or any(isinstance(item, list | tuple | set | dict) for item in items)


def _short(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**60:
        return "a very large number"
    return format_value(value[:200] if isinstance(value, str) else value)


def read_events(run: RunDirectoryReader) -> list[dict[str, Any]]:
    """Starts, ends, loss spikes and steps that were not finite, oldest first."""
    state = run.state("events.jsonl")
    content = run.read_tail(EVENTS_BYTES, "events.jsonl") if state else b""
    events = []
    for record in parse_lines(content.rpartition(b"\n")[0]):
        kind, step = record.get("event"), to_count(record.get("step"))
        if not isinstance(kind, str) or kind not in EVENT_KINDS or (step is None and kind not in ("start", "end")):
            continue
        samples = record.get("samples")
        indices = [to_count(index) for index in samples[:MAX_SAMPLES]] if isinstance(samples, list) else []
        event: dict[str, Any] = {
            "event": kind,
            "step": step or 0,
            "time": to_finite(record.get("time")),
            "samples": [index for index in indices if index is not None],
            "num_samples": len(samples) if isinstance(samples, list) else 0,
        }
        for name in ("reason", "outcome", "error", "host", "device"):
            if isinstance(record.get(name), str):
                event[name] = " ".join(record[name][:400].split())
        for name in ("loss", "expected"):
            if name in record:
                value = to_float(record[name])
                event[name] = to_finite(value) if to_finite(value) is not None else str(value)
        for name in ("ranks", "pid"):
            if to_count(record.get(name)) is not None:
                event[name] = to_count(record[name])
        event["resumed"] = record.get("resumed") is True
        events.append(event)
    return events[-MAX_EVENTS:]


def read_checkpoints(run: RunDirectoryReader) -> list[dict[str, Any]]:
    """Checkpoints in the run directory, latest first. Their sizes are those of all files."""
    _, names = run.list(CHECKPOINT_DIRECTORY)
    matches = sorted((int(match[1]), match[0]) for name in names if (match := STEP_DIRECTORY.fullmatch(name)))
    found = []
    for step, name in matches[: -MAX_CHECKPOINTS - 1 : -1]:
        files, _ = run.list(CHECKPOINT_DIRECTORY, name)
        states = [run.state(CHECKPOINT_DIRECTORY, name, file) for file in files[:20_000]]
        commit = run.state(CHECKPOINT_DIRECTORY, name, COMMIT_FILE)
        found.append(
            {
                "step": step,
                "path": f"{CHECKPOINT_DIRECTORY}/{name}",
                "bytes": sum(state.size for state in states if state),
                "files": len(files),
                "is_complete": commit is not None,
                "time": commit.modified if commit else None,
            }
        )
    return found


def list_logs(run: RunDirectoryReader) -> list[dict[str, Any]]:
    """Log files of a submitted run: those of its jobs, and those of the ranks by attempt and node."""
    found: list[dict[str, Any]] = []

    def add(*parts: str) -> None:
        files, directories = run.list(LOG_DIRECTORY, *parts)
        for file in files:
            state = run.state(LOG_DIRECTORY, *parts, file)
            if state and file.endswith((".log", ".out", ".err")) and len(found) < MAX_LOG_FILES:
                found.append({"file": "/".join((*parts, file)), "bytes": state.size, "time": state.modified})
        if len(parts) < 3:
            for directory in directories:
                add(*parts, directory)

    add()
    return found


def read_log(run: RunDirectoryReader, file: str, offset: int | None = None) -> dict[str, Any]:
    """The last lines of a log, or what was written after byte `offset`. Raises UserError if there is no such log."""
    parts = (LOG_DIRECTORY, *file.split("/"))
    state = run.state(*parts)
    if state is None or not file.endswith((".log", ".out", ".err")):
        raise UserError("no such log")
    start = state.size - LOG_BYTES if offset is None or not state.size - LOG_BYTES <= offset <= state.size else offset
    is_addition = offset is not None and start == offset
    try:
        with run.open(*parts) as opened:
            opened.seek(max(start, 0))
            content = opened.read(LOG_BYTES)
    except OSError:
        raise UserError("no such log") from None
    end = max(start, 0) + len(content)
    if start > 0 and not is_addition:
        content = content.partition(b"\n")[2]
    return {"text": content.decode(errors="replace"), "next_offset": end, "is_addition": is_addition}

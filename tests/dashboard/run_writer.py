"""Writes run directories as the contract of their files says, without training."""

import json
import math
import random
import struct
import time
from pathlib import Path
from typing import Any

CONFIG = """\
data:
  seq_len: 256
train:
  steps: {steps}
  global_batch: 16
optimizer:
  lr: {lr}
"""


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def training_record(step: int, **changes: Any) -> dict[str, Any]:
    draw = random.Random(step)
    return {
        "step": step,
        "time": 1.79e9 + 0.5 * step,
        "consumed_samples": 16 * step,
        "consumed_tokens": 4096 * step,
        "ms_per_iteration": 200.0,
        "tokens_per_second": 20000 + draw.gauss(0, 500),
        "mfu": 0.4 + draw.gauss(0, 0.01),
        "lr": 1e-3 * min(1, step / 50),
        "loss": 1.5 + 4 * math.exp(-step / 100) + draw.gauss(0, 0.03),
        "grad_norm": abs(draw.gauss(0.8, 0.1)),
        "memory_bytes": 3e8,
        "skipped": 0,
        **changes,
    }


def write_run(
    root: Path,
    name: str,
    steps: int = 200,
    total: int = 200,
    lr: float = 0.002,
    outcome: str | None = "completed",
    error: str | None = None,
    events: list[dict[str, Any]] | None = None,
    started: float | None = None,
) -> Path:
    """A run directory with metrics, events and configuration. `outcome` None: the run was killed."""
    directory = root / name
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"id": name, "name": name}))
    (directory / "config.yaml").write_text(CONFIG.format(steps=total, lr=lr))
    records = [training_record(step) for step in range(1, steps + 1)]
    records[0:1] = [records[0] | {"device": "CPU, 1 thread", "ranks": 2}]
    for step in range(50, steps + 1, 50):
        records.append({"step": step, "evaluate/loss": 1.6 + 1 / step, "evaluate/perplexity": 5.0})
    write_lines(directory / "metrics.jsonl", sorted(records, key=lambda record: record["step"]))
    now = started or time.time() - 3600
    start = {"step": 0, "time": now, "event": "start", "ranks": 2, "device": "CPU, 1 thread", "resumed": False}
    end = {"step": steps, "time": now + 60, "event": "end", "outcome": outcome, "error": error}
    write_lines(directory / "events.jsonl", [start, *(events or []), *([end] if outcome else [])])
    return directory


def loss_spike(step: int, samples: list[int]) -> dict[str, Any]:
    return {"step": step, "time": 1.79e9, "event": "loss_spike", "loss": 5.5, "expected": 2.25, "samples": samples}


def write_spans(directory: Path, rank: int, durations_ns: dict[int, int], name: str | None = None) -> Path:
    """A span file: in every step one span of depth 1, and the outermost one named step."""
    (directory / "spans").mkdir(exist_ok=True)
    path = directory / "spans" / (name or f"rank-{rank:05d}.spans")
    header = {"version": 1, "rank": rank, "host": "h", "names": ["forward", "step"], "start_unix_ns": 0}
    body, start = b"", 0
    for step, duration in durations_ns.items():
        body += struct.pack("<IHHQQ", step, 0, 1, start, duration // 2)
        body += struct.pack("<IHHQQ", step, 1, 0, start, duration)
        start += duration
    path.write_bytes(json.dumps(header | {"record_bytes": 24}).encode() + b"\n" + body)
    return path


def marked(*parts: tuple[str, bool]) -> dict[str, Any]:
    """A text of inputs.jsonl. Every character is a token."""
    tokens, trained = (sum(len(text) for text, is_trained in parts if is_trained in kinds) for kinds in ([0, 1], [1]))
    return {"tokens": tokens, "trained": trained, "shown": tokens, "parts": parts}


def rollout(step: int, text: str, reward: float, group: int = 0, **changes: Any) -> dict[str, Any]:
    """One completion of rollouts.jsonl."""
    names = {"step": step, "prompt": f"prompt {step}", "completion": text, "rewards": {"right": reward}}
    return {
        **names,
        "reward": reward,
        "advantage": reward - 0.5,
        "tokens": 34,
        "finished": True,
        "group": group,
        **changes,
    }

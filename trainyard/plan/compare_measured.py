"""A prediction beside what a run has measured: its directory has the configuration and a line of numbers per step."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trainyard.config.load import load
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.plan.hardware.catalog import TABLE
from trainyard.plan.report import Plan

WARM = 2
"""Logged lines at the start that are left out: the first steps compile, tune and fill caches."""


@dataclass(frozen=True)
class Row:
    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def config_of(directory: Path, words: list[str]) -> Config:
    path = directory / "config.yaml"
    if not path.is_file():
        raise UserError(f"{directory}: not a run's directory: config.yaml is missing")
    return load(path, words)


def measured_on(directory: Path) -> str | None:
    """What the run was on, as a word for `hardware`; None where it does not say."""
    first = _records(directory / "metrics.jsonl")[0]
    device, ranks = first.get("device"), first.get("ranks")
    if not isinstance(device, str) or not isinstance(ranks, int):
        return None
    for name, entry in TABLE.items():
        if name in device.lower():
            node = entry.devices * next(iter(entry.ranks.values())) if entry.counted == "instances" else 1
            return f"{name}:{-(-ranks // node)}"
    return f"cpu:{ranks}"


def compare(plan: Plan, directory: Path) -> list[Row]:
    """The median of what was measured after the first lines; memory at its highest."""
    records = _records(directory / "metrics.jsonl")
    steady = records[WARM:] or records[-1:]

    def middle(name: str) -> float:
        return float(median(record[name] for record in steady))

    cost = plan.cost
    memory = "memory, GiB" + " (Python's own too)" * (plan.on.entry.kind == "cpu")
    rows = [
        Row("ms per step", plan.step.seconds * 1000, middle("ms_per_iteration")),
        Row("tokens/s", cost.tokens_per_second, middle("tokens_per_second")),
        Row(memory, plan.memories[0].total / 2**30, max(each["memory_bytes"] for each in records) / 2**30),
    ]
    if all("mfu" in record for record in steady):
        rows.append(Row("MFU, %", 100 * cost.mfu_full, 100 * middle("mfu")))
    return [row for row in rows if row.measured > 0]


def _records(path: Path) -> list[dict[str, Any]]:
    """Lines of steps. A line that a crash cut short is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    out = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("ms_per_iteration"), float):
            out.append(record)
    if not out:
        raise UserError(f"{path}: no step is in it yet; let the run log one (log.every)")
    return out

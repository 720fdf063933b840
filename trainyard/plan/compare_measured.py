"""A prediction beside what a run has measured: its directory has the configuration and a line of numbers per step."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trainyard.config.load import load
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.plan.hardware.catalog import CATALOG
from trainyard.plan.report import Plan

WARMUP_RECORDS = 2
"""Logged lines at the start that are left out: the first steps compile, tune and fill caches."""


@dataclass(frozen=True)
class ComparisonRow:
    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def load_run_config(directory: Path, overrides: list[str]) -> Config:
    path = directory / "config.yaml"
    if not path.is_file():
        raise UserError(f"{directory}: not a run's directory: config.yaml is missing")
    return load(path, overrides)


def run_hardware(directory: Path) -> str | None:
    """What the run was on, as a word for `hardware`; None where it does not say."""
    first = _read_records(directory / "metrics.jsonl")[0]
    device, ranks = first.get("device"), first.get("ranks")
    if not isinstance(device, str) or not isinstance(ranks, int):
        return None
    for name, entry in CATALOG.items():
        if name in device.lower():
            node = entry.devices * next(iter(entry.ranks_per_device.values())) if entry.count_unit == "instances" else 1
            return f"{name}:{-(-ranks // node)}"
    return f"cpu:{ranks}"


def compare_with_measured(plan: Plan, directory: Path) -> list[ComparisonRow]:
    """The median of what was measured after the first lines; memory at its highest."""
    records = _read_records(directory / "metrics.jsonl")
    steady = records[WARMUP_RECORDS:] or records[-1:]

    def middle(name: str) -> float:
        return float(median(record[name] for record in steady))

    cost = plan.cost
    memory = "memory, GiB" + " (Python's own too)" * (plan.hardware.entry.kind == "cpu")
    rows = [
        ComparisonRow("ms per step", plan.step_time.seconds * 1000, middle("ms_per_iteration")),
        ComparisonRow("tokens/s", cost.tokens_per_second, middle("tokens_per_second")),
        ComparisonRow(
            memory, plan.stage_memory[0].total / 2**30, max(each["memory_bytes"] for each in records) / 2**30
        ),
    ]
    if all("mfu" in record for record in steady):
        rows.append(ComparisonRow("MFU, %", 100 * cost.mfu_full, 100 * middle("mfu")))
    return [row for row in rows if row.measured > 0]


def _read_records(path: Path) -> list[dict[str, Any]]:
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

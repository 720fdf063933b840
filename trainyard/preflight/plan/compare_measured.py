"""Comparison of a plan with a finished run, whose directory has config.yaml and a line of metrics per logged step."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trainyard.config.load import load
from trainyard.config.schema import Config
from trainyard.core.constants import GIB
from trainyard.core.errors import UserError
from trainyard.metrics.json_lines import read_json_lines
from trainyard.preflight.plan.hardware.catalog import CATALOG
from trainyard.preflight.plan.report import Plan

WARMUP_RECORDS = 2
"""Records at the start that are ignored: the first steps compile, tune and fill caches."""


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
        raise UserError(f"{directory}: not a run directory: config.yaml is missing")
    return load(path, overrides)


def run_hardware(directory: Path) -> str | None:
    """The hardware of the run in the form of `parse_hardware`; None if its metrics do not name it."""
    first = _read_records(directory / "metrics.jsonl")[0]
    device, ranks = first.get("device"), first.get("ranks")
    if not isinstance(device, str) or not isinstance(ranks, int):
        return None
    return catalog_hardware(device, ranks)


def catalog_hardware(device: str, ranks: int) -> str:
    """`ranks` ranks on a device, by its description, in the form of `parse_hardware`; the CPU if it is not in the
    catalog."""
    for name, entry in CATALOG.items():
        if name in device.lower():
            per_instance = entry.devices * next(iter(entry.ranks_per_device.values()))
            return f"{name}:{-(-ranks // per_instance) if entry.count_unit == 'instances' else ranks}"
    return f"cpu:{ranks}"


def compare_with_measured(plan: Plan, directory: Path) -> list[ComparisonRow]:
    """Predictions next to the median of the records after warmup; memory next to its maximum."""
    records = _read_records(directory / "metrics.jsonl")
    steady = records[WARMUP_RECORDS:] or records[-1:]

    def measured(name: str) -> float:
        return float(median(record[name] for record in steady))

    cost = plan.cost
    memory_name = "memory, GiB" + " (with Python)" * (plan.hardware.entry.kind.is_host)
    memory = max(record["memory_bytes"] for record in records)
    rows = [
        ComparisonRow("ms per step", plan.step_time.seconds * 1000, measured("ms_per_iteration")),
        ComparisonRow("tokens/s", cost.tokens_per_second, measured("tokens_per_second")),
        ComparisonRow(memory_name, plan.memory_by_pp[0].total / GIB, memory / GIB),
    ]
    if all("mfu" in record for record in steady):
        rows.append(ComparisonRow("MFU, %", 100 * cost.mfu_full, 100 * measured("mfu")))
    return [row for row in rows if row.measured > 0]


def _read_records(path: Path) -> list[dict[str, Any]]:
    """Records of training steps since the last start or resume, which may have been on other hardware. A line that a
    crash truncated is ignored."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    records = [record for record in read_json_lines(path).records if isinstance(record.get("ms_per_iteration"), float)]
    if not records:
        raise UserError(f"{path}: has no step yet; let the run log one (log.every)")
    last_start = max((number for number, record in enumerate(records) if "ranks" in record), default=0)
    return records[last_start:]

"""Prints the plan of a run next to what it measured, as JSON: python -m trainyard.dashboard.plan_process RUN

The page runs this in a process of its own: the plan imports torch, which takes seconds and memory.
"""

import json
import sys
from pathlib import Path
from typing import Any

from trainyard.core.errors import UserError, one_line
from trainyard.preflight.plan.compare_measured import compare_with_measured, load_run_config, run_hardware
from trainyard.preflight.plan.hardware.microbenchmark import measure_cpu
from trainyard.preflight.plan.hardware.spec import needed_hardware, parse_hardware
from trainyard.preflight.plan.report import BOTTLENECK_NAMES, make_plan


def compare(directory: Path) -> dict[str, Any]:
    config = load_run_config(directory, [])
    plan = make_plan(config, parse_hardware(run_hardware(directory) or needed_hardware(config), None, measure_cpu))
    rows = compare_with_measured(plan, directory)
    return {
        "hardware": plan.hardware.describe(),
        "layout": plan.layout.describe(),
        "bottleneck": plan.bottleneck,
        "rows": [{**vars(row), "ratio": row.ratio} for row in rows],
        "parts": {BOTTLENECK_NAMES[name]: share for name, share in plan.time_shares.items() if share > 0},
    }


def main() -> None:
    try:
        print(json.dumps(compare(Path(sys.argv[1]))))
    except UserError as error:
        print(json.dumps({"problem": one_line(error)}))


if __name__ == "__main__":
    main()

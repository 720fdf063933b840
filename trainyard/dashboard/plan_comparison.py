"""Plans of runs next to their measurements, computed one at a time in other processes and kept.

`python -m trainyard.dashboard.plan_comparison RUN` prints one as JSON: the plan imports torch, which takes seconds and
memory, so the dashboard computes it in a process of its own.
"""

import json
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from trainyard.core.errors import UserError, one_line
from trainyard.dashboard.run_files import RunDirectoryReader

TIMEOUT_S = 300
MAX_KEPT = 200
MAX_WAITING = 8
COMPUTING = {"state": "computing"}


class PlanComparisons:
    """Answers at once: with the comparison, or that it is being computed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._one_process = threading.Lock()
        self._done: OrderedDict[tuple[object, ...], dict[str, Any]] = OrderedDict()
        self._waiting: set[tuple[object, ...]] = set()
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def get(self, run: RunDirectoryReader, training: bool) -> dict[str, Any]:
        """The comparison of a run. While the run trains it stays as first computed; at its end it is computed again."""
        config, metrics = run.state("config.yaml"), run.state("metrics.jsonl")
        if config is None or metrics is None:
            return {"state": "done", "problem": "the plan needs config.yaml and metrics.jsonl, which this run has not"}
        key = (run.name, config, metrics.inode, training or metrics.size)
        with self._lock:
            if key in self._done:
                return self._done[key]
            if key in self._waiting:
                return COMPUTING
            if len(self._waiting) >= MAX_WAITING:
                return {"state": "done", "problem": "too many plans are being computed; try again later"}
            self._waiting.add(key)
        threading.Thread(target=self._work, args=[key, run], name="plan", daemon=True).start()
        return COMPUTING

    def _work(self, key: tuple[object, ...], run: RunDirectoryReader) -> None:
        with self._one_process:
            result = {"problem": "the page is closed"} if self._closed else self.compute(run)
        with self._lock:
            self._waiting.discard(key)
            self._done[key] = {"state": "done", **result}
            while len(self._done) > MAX_KEPT:
                self._done.popitem(last=False)

    def compute(self, run: RunDirectoryReader) -> dict[str, Any]:
        """Compute the comparison now: a dictionary with rows, or with the problem."""
        command = [sys.executable, "-m", "trainyard.dashboard.plan_comparison", str(run.path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            output, _ = self._process.communicate(timeout=TIMEOUT_S)
            result = json.loads(output)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return {"problem": f"the plan took more than {TIMEOUT_S} s"}
        except ValueError:
            return {"problem": f"the plan could not be computed; see: trainyard plan {run.path}"}
        return result if isinstance(result, dict) else {"problem": "the plan could not be computed"}

    def close(self) -> None:
        self._closed = True
        if self._process and self._process.poll() is None:
            self._process.kill()


def compare(directory: Path) -> dict[str, Any]:
    """The plan of a run next to what the run measured."""
    from trainyard.preflight.plan.compare_measured import compare_with_measured, load_run_config, run_hardware
    from trainyard.preflight.plan.hardware.microbenchmark import measure_cpu
    from trainyard.preflight.plan.hardware.spec import needed_hardware, parse_hardware
    from trainyard.preflight.plan.report import BOTTLENECK_NAMES, make_plan

    config = load_run_config(directory, [])
    name = run_hardware(directory) or needed_hardware(config.hardware, config.layout, config.device.lnc)
    plan = make_plan(config, parse_hardware(name, None, measure_cpu))
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

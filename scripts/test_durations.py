"""Print a Markdown table of the slowest test files from the output of `pytest --durations=0`.

make test ARGS=--durations=0 > log; python scripts/test_durations.py log
"""

import re
import sys
from collections import Counter
from pathlib import Path

DURATION = re.compile(r"([\d.]+)s (?:setup|call|teardown) +([^:]+)::")
SUMMARY = re.compile(r"\d+ passed.* in [\d.]+s.*")
MAX_ROWS = 25


def durations_table(log: str) -> str:
    """Seconds by file, including set-up and tear-down of its tests; files beyond MAX_ROWS are summed."""
    seconds: Counter[str] = Counter()
    for match in DURATION.finditer(log):
        seconds[match[2]] += float(match[1])
    rows = [(name.removesuffix(".py"), duration) for name, duration in seconds.most_common(MAX_ROWS)]
    others = len(seconds) - len(rows)
    rows += [(f"{others} other files", seconds.total() - sum(duration for _, duration in rows))]
    rows += [("all", seconds.total())]
    summaries = SUMMARY.findall(log)  # none with pytest -q -q
    lines = [*(f"{summary.strip('= ')}.\n" for summary in summaries[-1:]), "| file | seconds |", "|---|---:|"]
    return "\n".join([*lines, *(f"| {name} | {duration:.1f} |" for name, duration in rows)])


if __name__ == "__main__":
    print(durations_table(Path(sys.argv[1]).read_text()))

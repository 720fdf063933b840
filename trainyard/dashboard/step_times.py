"""Step time of every rank over the run, from the span files of the ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.dashboard.metrics_table import FloatArray, to_json
from trainyard.dashboard.run_files import RunDirectoryReader
from trainyard.metrics.spans import DIRECTORY, FILE_NAME, OLD_SUFFIX, RankSpans, read_open_spans, step_times

TOTAL_BYTES = 128 << 20
"""Bytes that are read of the files of all ranks together; of longer files, the end."""
MAX_COLUMNS = 160
MAX_ROWS = 64
"""More ranks are shown in groups, by their slowest rank."""


def read_step_times(run: RunDirectoryReader) -> dict[int, FloatArray]:
    """(step, milliseconds) of the steps of every rank, in order of steps, by rank: the latest that fit into
    TOTAL_BYTES."""
    names, _ = run.list(DIRECTORY)
    by_rank: dict[int, list[str]] = {}
    for name in sorted(names, key=lambda name: not name.endswith(OLD_SUFFIX)):  # the older file of a rank comes first
        if match := FILE_NAME.fullmatch(name.removesuffix(OLD_SUFFIX)):
            by_rank.setdefault(int(match[1]), []).append(name)
    budget = TOTAL_BYTES // max(sum(map(len, by_rank.values())), 1)
    times = {rank: step_times(_read(run, name, rank, budget) for name in by_rank[rank]) for rank in sorted(by_rank)}
    return {rank: np.array(list(of_rank.items()), np.float64) for rank, of_rank in times.items() if of_rank}


def _read(run: RunDirectoryReader, name: str, rank: int, budget: int) -> RankSpans | None:
    try:
        with run.open(DIRECTORY, name) as file:
            return read_open_spans(file, rank, budget)
    except OSError:
        return None


def heat_map(times: Mapping[int, Sequence[tuple[int, float]] | FloatArray]) -> dict[str, Any]:
    """Milliseconds by group of ranks and bucket of steps, and the ranks that are slower than the others. `times` has
    (step, milliseconds) by rank."""
    values = {rank: np.asarray(times[rank], np.float64) for rank in sorted(times) if len(times[rank])}
    if not values:
        return {"ranks": [], "edges": [], "rows": [], "slowest": []}
    ranks = list(values)
    first = min(int(pairs[0, 0]) for pairs in values.values())
    last = max(int(pairs[-1, 0]) for pairs in values.values())
    edges = np.unique(np.linspace(first, last + 1, min(last - first + 1, MAX_COLUMNS) + 1).astype(np.int64))
    size = -(-len(ranks) // MAX_ROWS)
    groups = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    means = {rank: _bucket_means(pairs, edges) for rank, pairs in values.items()}
    medians = {rank: float(np.median(pairs[:, 1])) for rank, pairs in values.items()}
    typical = float(np.median(list(medians.values())))
    slowest = sorted(ranks, key=lambda rank: -medians[rank])[:5]
    return {
        "ranks": [[group[0], group[-1]] for group in groups],
        "edges": edges.tolist(),
        "rows": [to_json(np.fmax.reduce([means[rank] for rank in group]).tolist()) for group in groups],
        "slowest": [
            {"rank": rank, "ms": medians[rank], "ratio": medians[rank] / typical if typical else 1.0}
            for rank in slowest
        ],
    }


def _bucket_means(pairs: FloatArray, edges: NDArray[np.int64]) -> FloatArray:
    bucket = np.searchsorted(edges, pairs[:, 0], side="right") - 1
    counts = np.bincount(bucket, minlength=len(edges) - 1)
    sums = np.bincount(bucket, weights=pairs[:, 1], minlength=len(edges) - 1)
    return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)

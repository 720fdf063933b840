"""The numbers of metrics.jsonl as columns, and a selection of them that fits a chart.

A chart has a few hundred pixels, a run may have a million steps. `select` divides the rows into buckets and keeps, for
each series, the rows with its minimum and maximum in every bucket: no spike is lost. It also returns the mean of every
bucket, from which a smooth curve can be drawn that the choice of extremes does not distort.

Besides what every run logs, a run may have metrics named with a prefix, such as rewards/chosen. They are columns from
the first record on that has them.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.metrics.json_lines import as_number, to_count, to_finite

FloatArray = NDArray[np.float64]
AXES = ("step", "tokens", "time")
SERIES = ("loss", "grad_norm", "tokens_per_second", "mfu", "lr")
COLUMNS = (*AXES, *SERIES)
EVALUATION_PREFIX = "evaluate/"
METRICS = ("kl", "clip_fraction")
"""Metrics of some runs that have no prefix."""
MAX_METRICS = 24
"""Columns of a run besides those of all runs; further ones are left out."""
MAX_NAME_CHARS = 80
ROWS_PER_BUCKET = 4
"""Up to this many rows per bucket, all of them are sent."""
MAX_ROWS = 400_000
"""More rows of one run are thinned: of every eight, those with the extremes of loss and gradient norm remain."""
MAX_EVALUATIONS = 20_000
MAX_EVALUATION_NAMES = 256
MAX_REASONS = 1000
"""Reasons of steps that were not finite, that are kept."""
MAX_REASON_CHARS = 300


class MetricsTable:
    """Training records as rows of numbers, NaN where there is none; evaluations; why steps were not finite."""

    def __init__(self, tokens_per_sample: float | None = None) -> None:
        """`tokens_per_sample` counts the tokens of records that have only consumed_samples."""
        self.tokens_per_sample = tokens_per_sample
        self.names = [*COLUMNS]
        """The columns: those of all runs, and then the metrics of this one."""
        self._values = np.empty((0, len(COLUMNS)))
        self.count = 0
        self.evaluations: list[tuple[int, dict[str, float | None]]] = []
        self.not_finite: dict[int, str] = {}
        self.thinned = 0
        """How many times rows were dropped."""

    @property
    def rows(self) -> FloatArray:
        return self._values[: self.count]

    @property
    def nbytes(self) -> int:
        return self._values.nbytes

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        known = [record for record in records if to_count(record.get("step")) is not None]
        self._append_rows([record for record in known if "loss" in record])
        for record in known:
            if "loss" not in record:
                values = {
                    name[:80]: to_finite(value)
                    for name, value in list(record.items())[: MAX_EVALUATION_NAMES + 2]
                    if name.startswith(EVALUATION_PREFIX)
                }
                if values and len(self.evaluations) < MAX_EVALUATIONS:
                    self.evaluations.append((int(record["step"]), values))
            reason = record.get("not_finite")
            if isinstance(reason, str) and len(self.not_finite) < MAX_REASONS:
                self.not_finite[int(record["step"])] = reason[:MAX_REASON_CHARS]

    def _append_rows(self, records: list[dict[str, Any]]) -> None:
        if not records:
            return
        self._add_columns(records)
        new = np.empty((len(records), len(self.names)))
        for column, name in enumerate(self.names):
            if name == "tokens":
                new[:, column] = self._tokens(records)
            else:
                new[:, column] = to_floats([record.get(name) for record in records])
        needed = self.count + len(new)
        if needed > len(self._values):
            grown = np.empty((max(needed, len(self._values) * 5 // 4, 256), len(self.names)))
            grown[: self.count] = self.rows
            self._values = grown
        self._values[self.count : needed] = new
        self.count = needed
        if self.count > MAX_ROWS:
            self._thin()

    def _add_columns(self, records: list[dict[str, Any]]) -> None:
        """Columns for metrics that no record had before."""
        names = dict.fromkeys(name for record in records for name in record if is_metric(name))
        added = [name for name in names if name not in self.names][: len(COLUMNS) + MAX_METRICS - len(self.names)]
        if added:
            self.names += added
            self._values = np.pad(self._values, ((0, 0), (0, len(added))), constant_values=np.nan)

    def _tokens(self, records: list[dict[str, Any]]) -> FloatArray:
        tokens = to_floats([record.get("consumed_tokens") for record in records])
        if self.tokens_per_sample and np.isnan(tokens).any():
            samples = to_floats([record.get("consumed_samples") for record in records])
            tokens = np.where(np.isnan(tokens), samples * self.tokens_per_sample, tokens)
        return tokens

    def _thin(self) -> None:
        kept = _extreme_rows(self.rows[:, [COLUMNS.index("loss"), COLUMNS.index("grad_norm")]], self.count // 8)
        self._values = self.rows[kept].copy()
        self.count = len(kept)
        self.thinned += 1

    def select(
        self, buckets: int, axis: str = "step", low: float | None = None, high: float | None = None
    ) -> dict[str, Any]:
        """Rows with `axis` from `low` to `high`, as JSON: `columns`, and `means` of buckets if rows were left out."""
        values = self.rows
        x = values[:, AXES.index(axis)]
        if low is not None or high is not None:
            inside = np.ones(len(x), bool)
            if low is not None:
                inside &= x >= low
            if high is not None:
                inside &= x <= high
            # One row more on each side, so that lines reach the edges of the chart.
            inside[:-1] |= inside[1:]
            inside[1:] |= inside[:-1]
            values = values[inside]
        steps = values[:, 0]
        if np.any(steps[1:] < steps[:-1]):
            values = values[np.argsort(steps, kind="stable")]
        if len(values) <= ROWS_PER_BUCKET * buckets:
            return {"columns": self._columns(values)}
        kept = _extreme_rows(values[:, len(AXES) : len(COLUMNS)], buckets)
        if metrics := len(self.names) - len(COLUMNS):  # many have larger buckets, and add no more rows than the others
            larger = max(buckets * len(SERIES) // max(metrics, len(SERIES)), 1)
            kept = np.union1d(kept, _extreme_rows(values[:, len(COLUMNS) :], larger))
        return {"columns": self._columns(values[kept]), "means": self._columns(_bucket_means(values, buckets))}

    def select_after(self, row: int) -> dict[str, Any]:
        """All rows from `row` on."""
        return {"columns": self._columns(self.rows[row:])}

    def _columns(self, values: FloatArray) -> dict[str, list[Any]]:
        return {
            name: (to_json_exact if name in AXES else to_json)(values[:, column].tolist())
            for column, name in enumerate(self.names)
        }


def is_metric(name: str) -> bool:
    """True for a key of a training record that only some runs have, and that the dashboard draws."""
    is_grouped = "/" in name.strip("/") and not name.startswith(EVALUATION_PREFIX) and len(name) <= MAX_NAME_CHARS
    return is_grouped or name in METRICS


def _in_buckets(values: FloatArray, buckets: int) -> FloatArray:
    """A view as (bucket, row, series); the last bucket is filled with NaN."""
    size = -(-len(values) // buckets)
    padded = np.full((-(-len(values) // size) * size, values.shape[1]), np.nan)
    padded[: len(values)] = values
    return padded.reshape(-1, size, values.shape[1])


def _extreme_rows(values: FloatArray, buckets: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Indices of the rows with the minimum or maximum of a series in a bucket, and of the first and last row."""
    grouped = _in_buckets(values, buckets)
    finite = np.isfinite(grouped)
    starts = np.arange(len(grouped))[:, None] * grouped.shape[1]
    lowest = starts + np.where(finite, grouped, np.inf).argmin(axis=1)
    highest = starts + np.where(finite, grouped, -np.inf).argmax(axis=1)
    ends = np.array([0, len(values) - 1])
    return np.unique(np.concatenate([lowest.ravel(), highest.ravel(), ends]).clip(max=len(values) - 1))


def _bucket_means(values: FloatArray, buckets: int) -> FloatArray:
    grouped = _in_buckets(values, buckets)
    finite = np.isfinite(grouped)
    counts = finite.sum(axis=1)
    with np.errstate(over="ignore"):
        sums = np.where(finite, grouped, 0.0).sum(axis=1)
    return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)


def to_float(value: Any) -> float:
    """A number of a record; NaN for everything else."""
    number = as_number(value)
    return math.nan if number is None else float(number)


def to_floats(values: Sequence[Any]) -> FloatArray:
    if all(type(value) is float or (type(value) is int and -(2**53) < value < 2**53) for value in values):
        return np.array(values, np.float64)
    return np.array([to_float(value) for value in values], np.float64)


def to_json(values: Iterable[float]) -> list[float | None]:
    """Numbers with six significant digits; None where they are not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def to_json_exact(values: Iterable[float]) -> list[float | int | None]:
    """Numbers as they are; whole ones without a fraction."""
    return [
        None if not math.isfinite(value) else int(value) if value == int(value) else round(value, 3) for value in values
    ]

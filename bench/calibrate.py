"""Fit the few constants of `trainyard plan` to measured speeds, and show how far off each prediction is.

    python bench/calibrate.py    each run predicted with constants fitted to the others, as in docs/lab/plan-accuracy.md

The runs and their sources are in published_runs.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import mean, median
from typing import Any

import numpy as np
from published_runs import H200_RUNS, TRN1_RUNS, PublishedRun

from trainyard.devices.kind import Efficiency
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.time.step_time import predict_step

RUN_SETS = {"trn1": TRN1_RUNS, "h200": H200_RUNS}
FITTED_CONSTANTS = {
    "trn1": (("matmul", "attention"), ("memory",), ("link",), ("network",)),
    "h200": (("matmul",), ("attention",), ("memory",)),
}
"""The constants that are fitted to each set of runs. Names in one tuple share a value."""


def predicted_speed(run: PublishedRun, efficiency: Efficiency) -> float:
    """Sequences per second."""
    config = run.config()
    layout = Layout.from_config(config, run.hardware.ranks)
    planned = PlannedRun(config, layout, run.hardware.entry.kind)
    return config.train.global_batch / predict_step(planned, run.hardware, efficiency).seconds


@cache
def _time_shares(set_name: str, index: int) -> tuple[float, ...]:
    """Seconds of a step that are inversely proportional to each fitted constant, and seconds that depend on none."""
    run = RUN_SETS[set_name][index]
    batch = run.config().train.global_batch
    at_peak = batch / predicted_speed(run, Efficiency())
    shares = []
    for names in FITTED_CONSTANTS[set_name]:
        half = Efficiency()._replace(**dict.fromkeys(names, 0.5))
        shares.append(batch / predicted_speed(run, half) - at_peak)
    return *shares, at_peak - sum(shares)


def fit_efficiency(set_name: str, without: int | None = None) -> Efficiency:
    """The constants with the least mean square of relative errors over the set's runs, except run `without`. None of
    them is above 1: nothing is faster than its peak."""
    rows, targets = [], []
    for index, run in enumerate(RUN_SETS[set_name]):
        if index == without:
            continue
        measured = run.config().train.global_batch / run.sequences_per_second
        *shares, fixed = _time_shares(set_name, index)
        rows.append([share / measured for share in shares])
        targets.append(1 - fixed / measured)
    solution = _least_squares(np.array(rows), np.array(targets))
    groups = zip(FITTED_CONSTANTS[set_name], solution, strict=True)
    return Efficiency(**{name: float(1 / value) for names, value in groups for name in names})


def _least_squares(a: Any, b: Any) -> Sequence[float]:
    """The x >= 1 for which a x is closest to b: the best over all choices of components that are fixed at 1."""
    candidates = []
    for free in product((False, True), repeat=a.shape[1]):
        mask = np.array(free)
        x = np.ones(a.shape[1])
        if mask.any():
            x[mask] = np.linalg.lstsq(a[:, mask], b - a[:, ~mask].sum(1), rcond=None)[0]
        if (x >= 1).all():
            candidates.append((float(((a @ x - b) ** 2).sum()), list(x)))
    return min(candidates)[1]


@dataclass(frozen=True)
class HeldOutPrediction:
    """A run predicted with constants fitted to the other runs."""

    run: PublishedRun
    predicted: float
    """Sequences per second."""
    constants: Efficiency

    @property
    def error(self) -> float:
        return self.predicted / self.run.sequences_per_second - 1


def leave_one_out(set_name: str) -> list[HeldOutPrediction]:
    predictions = []
    for index, run in enumerate(RUN_SETS[set_name]):
        constants = fit_efficiency(set_name, index)
        predictions.append(HeldOutPrediction(run, predicted_speed(run, constants), constants))
    return predictions


def main() -> None:
    for name in RUN_SETS:
        predictions = leave_one_out(name)
        print(f"\n{name}: constants fitted to all runs: {_format_constants(fit_efficiency(name))}\n")
        print("| run | measured, sequences/s | predicted without it | error | constants without it | source |")
        print("|---|---|---|---|---|---|")
        for prediction in predictions:
            run = prediction.run
            measured, predicted = _format_speed(run.sequences_per_second), _format_speed(prediction.predicted)
            constants = _format_constants(prediction.constants)
            print(f"| {run.name} | {measured} | {predicted} | {prediction.error:+.1%} | {constants} | {run.source} |")
        errors = [abs(prediction.error) for prediction in predictions]
        print(f"\nmedian error {median(errors):.1%}, mean {mean(errors):.1%}, worst {max(errors):.1%}")


def _format_speed(speed: float) -> str:
    return f"{speed:,.0f}" if speed > 1000 else f"{speed:.4g}"


def _format_constants(efficiency: Efficiency) -> str:
    """Matrix products, attention, memory, link, network."""
    return " ".join(f"{value:.2f}" for value in efficiency)


if __name__ == "__main__":
    main()

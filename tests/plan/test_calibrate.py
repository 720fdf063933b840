"""The bar: runs that others have measured, each predicted by constants fitted without it."""

from dataclasses import replace
from statistics import median

import pytest

from trainyard.parallel.layout import Layout
from trainyard.plan.calibrate import (
    FITTED_CONSTANTS,
    H200_RUNS,
    RUN_SETS,
    TRN1_RUNS,
    PublishedRun,
    fit_efficiency,
    leave_one_out,
    predicted_speed,
)
from trainyard.plan.time.step_time import FITTED_EFFICIENCY, Efficiency, predict_step


def test_published_trn1_runs_are_predicted_within_15_percent() -> None:
    errors = [abs(row.error) for row in leave_one_out("trn1")]
    assert len(errors) == 10
    assert median(errors) < 0.15
    assert max(errors) < 0.30


def test_our_gpu_runs_are_predicted_within_10_percent() -> None:
    errors = [abs(row.error) for row in leave_one_out("h200")]
    assert len(errors) == 4
    assert max(errors) < 0.10


def test_constants_are_few_and_physical() -> None:
    for name, groups in FITTED_CONSTANTS.items():
        assert len(groups) <= 4 < len(RUN_SETS[name]) + 1
        assert all(0 < value <= 1 for value in fit_efficiency(name))


@pytest.mark.parametrize(("name", "key"), [("trn1", "trn1"), ("h200", "gpu")])
def test_what_a_plan_uses_is_what_the_fit_gives(name: str, key: str) -> None:
    free = [each for group in FITTED_CONSTANTS[name] for each in group]
    for each in free:
        assert getattr(FITTED_EFFICIENCY[key], each) == pytest.approx(getattr(fit_efficiency(name), each), abs=0.006)


def test_the_held_out_run_does_not_touch_its_own_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fit_efficiency("trn1", without=2)
    changed = (*TRN1_RUNS[:2], replace(TRN1_RUNS[2], sequences_per_second=1.0), *TRN1_RUNS[3:])
    monkeypatch.setitem(RUN_SETS, "trn1", changed)
    assert fit_efficiency("trn1", without=2) == before
    assert fit_efficiency("trn1") != before


@pytest.mark.parametrize("run", [*TRN1_RUNS, *H200_RUNS], ids=lambda run: f"{run.hardware_name}-{run.name}")
def test_nothing_is_faster_than_its_peaks(run: PublishedRun) -> None:
    """At peak rates no run is slower than it was measured; and the parts of a step add up to it."""
    assert predicted_speed(run, Efficiency()) > run.sequences_per_second
    config = run.config()
    found = predict_step(
        config, Layout.from_config(config, run.hardware.ranks), run.hardware, FITTED_EFFICIENCY["trn1"]
    )
    assert sum(found.components.values()) == pytest.approx(found.seconds)
    assert min(found.components.values()) >= 0

"""Runs that others measured, each predicted with constants fitted without it."""

from dataclasses import replace
from statistics import median

import pytest
from calibrate import (
    FITTED_CONSTANTS,
    H200_RUNS,
    RUN_SETS,
    TRN1_RUNS,
    PublishedRun,
    fit_efficiency,
    leave_one_out,
    predicted_speed,
)

from trainyard.parallel.layout import Layout
from trainyard.plan.time.efficiency import FITTED_EFFICIENCY, Efficiency
from trainyard.plan.time.step_time import predict_step


def test_published_trn1_runs_are_predicted_within_15_percent() -> None:
    errors = [abs(prediction.error) for prediction in leave_one_out("trn1")]
    assert len(errors) == 10
    assert median(errors) < 0.15
    assert max(errors) < 0.30


def test_measured_gpu_runs_are_predicted_within_10_percent() -> None:
    errors = [abs(prediction.error) for prediction in leave_one_out("h200")]
    assert len(errors) == 4
    assert max(errors) < 0.10


def test_constants_are_few_and_at_most_one() -> None:
    for name, groups in FITTED_CONSTANTS.items():
        assert len(groups) <= 4 < len(RUN_SETS[name]) + 1
        assert all(0 < value <= 1 for value in fit_efficiency(name))


@pytest.mark.parametrize(("set_name", "key"), [("trn1", "trn1"), ("h200", "gpu")])
def test_plans_use_the_fitted_constants(set_name: str, key: str) -> None:
    fitted = fit_efficiency(set_name)
    for name in (name for group in FITTED_CONSTANTS[set_name] for name in group):
        assert getattr(FITTED_EFFICIENCY[key], name) == pytest.approx(getattr(fitted, name), abs=0.006)


def test_a_held_out_run_does_not_affect_its_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fit_efficiency("trn1", without=2)
    changed = (*TRN1_RUNS[:2], replace(TRN1_RUNS[2], sequences_per_second=1.0), *TRN1_RUNS[3:])
    monkeypatch.setitem(RUN_SETS, "trn1", changed)
    assert fit_efficiency("trn1", without=2) == before
    assert fit_efficiency("trn1") != before


@pytest.mark.parametrize("run", [*TRN1_RUNS, *H200_RUNS], ids=lambda run: f"{run.hardware_name}-{run.name}")
def test_no_run_is_faster_than_its_peak_rates(run: PublishedRun) -> None:
    assert predicted_speed(run, Efficiency()) > run.sequences_per_second


@pytest.mark.parametrize("run", [*TRN1_RUNS, *H200_RUNS], ids=lambda run: f"{run.hardware_name}-{run.name}")
def test_the_components_of_a_step_add_up(run: PublishedRun) -> None:
    config = run.config()
    layout = Layout.from_config(config, run.hardware.ranks)
    step_time = predict_step(config, layout, run.hardware, FITTED_EFFICIENCY["trn1"])
    assert sum(step_time.components.values()) == pytest.approx(step_time.seconds)
    assert min(step_time.components.values()) >= 0

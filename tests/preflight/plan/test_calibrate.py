"""Runs that others measured, each predicted with constants fitted without it."""

from dataclasses import replace
from statistics import mean, median

import pytest
from calibrate import FITTED_CONSTANTS, RUN_SETS, fit_efficiency, leave_one_out, predicted_speed
from published_runs import H200_RUNS, TRN1_RUNS, PublishedRun

from trainyard.devices import DEVICES
from trainyard.devices.kind import Efficiency
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.time.step_time import predict_step


def test_published_trn1_runs_are_predicted_within_12_percent_in_the_median() -> None:
    """The accuracy that docs/lab/plan-accuracy.md states, over all runs and not over those that fit."""
    errors = [abs(prediction.error) for prediction in leave_one_out("trn1")]
    assert len(errors) == 20
    assert median(errors) < 0.12
    assert mean(errors) < 0.15
    assert max(errors) < 0.40


def test_every_published_layout_is_the_one_of_its_table() -> None:
    """TP, PP and DP of AWS's tables (training_data_decoder.csv, Neuron 2.17 to 2.24), copied by hand: a run planned
    with another layout, such as Llama 2 13B with PP 4 instead of 8, would fit constants to the wrong work."""
    published = {
        ("GPT 23B", 107.18): (8, 4, 32),
        ("GPT 46B", 48.24): (8, 8, 16),
        ("GPT 175B", 14.60): (32, 8, 4),
        ("Llama 2 7B", 95.14): (8, 1, 64),
        ("Llama 2 13B", 81.8): (8, 4, 32),
        ("Llama 2 13B", 80.33): (8, 8, 16),
        ("Llama 2 70B", 17.86): (32, 4, 8),
        ("Llama 2 70B", 14.44): (32, 8, 4),
        ("Llama 3.1 8B", 53.51): (32, 1, 32),
        ("Llama 3.1 8B", 47.95): (32, 1, 32),
        ("Llama 3.1 70B", 7.94): (32, 8, 4),
    }
    layouts = {}
    for run in TRN1_RUNS:
        layout = Layout.from_config(run.config(), run.hardware.ranks)
        layouts[run.name.partition(",")[0], run.sequences_per_second] = layout.tp, layout.pp, layout.dp
    assert {key: layouts[key] for key in published} == published


def test_measured_gpu_runs_are_predicted_within_10_percent() -> None:
    errors = [abs(prediction.error) for prediction in leave_one_out("h200")]
    assert len(errors) == 4
    assert max(errors) < 0.10


def test_constants_are_few_and_at_most_one() -> None:
    for name, groups in FITTED_CONSTANTS.items():
        assert len(groups) <= 4 < len(RUN_SETS[name]) + 1
        assert all(0 < value <= 1 for value in fit_efficiency(name))


@pytest.mark.parametrize(("set_name", "device"), [("trn1", "xla"), ("h200", "cuda")])
def test_plans_use_the_fitted_constants(set_name: str, device: str) -> None:
    fitted = fit_efficiency(set_name)
    for name in (name for group in FITTED_CONSTANTS[set_name] for name in group):
        assert getattr(DEVICES.find(device).efficiency, name) == pytest.approx(getattr(fitted, name), abs=0.006)


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
    planned = PlannedRun(config, layout, run.hardware.entry.kind)
    step_time = predict_step(planned, run.hardware, DEVICES.find("xla").efficiency)
    assert sum(step_time.components.values()) == pytest.approx(step_time.seconds)
    assert min(step_time.components.values()) >= 0
